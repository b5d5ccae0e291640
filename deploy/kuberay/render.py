"""The overlays as plain manifests, in the package: `flowgrpo-ray manifest` fills them in, on machines without kustomize too.

    python deploy/kuberay/render.py            writes flowgrpo_ray/cluster/overlays/*.yaml
    python deploy/kuberay/render.py --check    fails if one of them is not what kustomize makes of its overlay
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
PACKAGED = HERE.parents[1] / "flowgrpo_ray" / "cluster" / "overlays"


def render(name: str) -> str:
    made = subprocess.run(["kubectl", "kustomize", str(HERE / "overlays" / name)], check=True, capture_output=True, text=True)
    return f"# Made by deploy/kuberay/render.py from deploy/kuberay/overlays/{name}: change that.\n{made.stdout}"


def _trees(text: str) -> list[object]:
    return list(yaml.safe_load_all(text))  # how it is laid out is kustomize's to choose


def main(check: bool) -> int:
    stale = []
    for folder in sorted((HERE / "overlays").iterdir()):
        file, text = PACKAGED / f"{folder.name}.yaml", render(folder.name)
        if check and (not file.is_file() or _trees(file.read_text()) != _trees(text)):
            stale.append(file.name)
        elif not check:
            PACKAGED.mkdir(exist_ok=True)
            file.write_text(text)
    if stale:
        print(f"not what their overlays give: {', '.join(stale)}; run python deploy/kuberay/render.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
