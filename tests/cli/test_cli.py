"""The command line: what each command does, what a newcomer sees, and how it ends when something is wrong."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny_pipelines
from command import cli, start, write_config
from PIL import Image
from safetensors.numpy import load_file

from flowgrpo_ray.config.load import load, to_yaml
from flowgrpo_ray.policies.lora import load_adapter
from flowgrpo_ray.rewards import known_rewards
from flowgrpo_ray.run_dir.metrics import METRICS, read_metrics
from flowgrpo_ray.run_dir.sample_table import read_grid

COMMANDS = ("train", "eval", "sample", "export", "report", "doctor", "compare", "prompts", "config", "rewards", "score",
            "serve-reward", "metrics", "version", "manifest", "fetch",
            "submit", "runs", "status", "scale", "checkpoint", "stop")


@pytest.fixture(autouse=True)
def process_settings():
    """A command sets up logging, warnings, signals and environment of its process; here that is the tests' own."""
    root, environment, filters = logging.getLogger(), dict(os.environ), list(warnings.filters)
    handlers = list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in ("", "flowgrpo_ray", "actors")}
    on_signal = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in on_signal.items():
        signal.signal(number, handler)
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    warnings.filters[:] = filters
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module", autouse=True)
def ray_folders():
    """Ray's folders of the processes that `start` starts: short paths, since Ray puts sockets into them."""
    yield
    for folder in Path("/tmp").glob(f"fgc{os.getpid()}*"):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, made by the command; (folder, config file, run directory, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("cli")
    config = write_config(folder)
    process = start(folder, "train", config)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, (out, err)
    yield folder, config, folder / "runs" / "small", out, err


# What there is --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    text = cli(command, "--help").output
    assert f"Example: flowgrpo-ray {command}" in text


def test_help_lists_every_command_in_a_line():
    text = cli("--help").output
    assert all(f"\n  {command} " in text for command in COMMANDS) and "..." not in text.replace("[ARGS]...", "")


def test_cheap_commands_import_nothing_heavy():
    code = ("import sys\nfrom typer.testing import CliRunner\nfrom flowgrpo_ray.cli.main import app\n"
            "for args in (['--help'], ['train', '--help'], ['config'], ['rewards'], ['metrics'], ['version']):\n"
            "    assert CliRunner().invoke(app, args).exit_code == 0, args\n"
            "print([m for m in ('torch', 'ray', 'diffusers', 'transformers', 'matplotlib') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("plain", [True, False])
def test_config_prints_what_loads_again(tmp_path, plain):
    source = write_config(tmp_path)
    text = cli("config", source, "sampling.group_size=8", *(["--plain"] if plain else [])).output
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load(again) == load(source, ["sampling.group_size=8"])
    assert ("# Samples per prompt (k)" in text) is not plain


def test_config_without_a_file_prints_the_defaults(tmp_path):
    again = tmp_path / "again.yaml"
    again.write_text(cli("config", "train.seed=7").output)
    assert to_yaml(load(again)) == to_yaml(load(None, {"rewards": {"ocr": {}}, "train.seed": 7}))


def test_lists_of_rewards_metrics_and_versions():
    rewards = cli("rewards").output
    assert all(f"{name}\n" in rewards for name in known_rewards())
    assert "range 0 to 1" in rewards and "paddleocr" in rewards and "option mode = full" in rewards
    assert cli("rewards", "jpeg_compressibility").output.startswith("jpeg_compressibility\n")
    assert all(f"`{metric.pattern}`" in cli("metrics").output for metric in METRICS[:5])
    assert cli("version").output.startswith("flowgrpo-ray ") and "\nray " in cli("version").output


# Wrong input ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("args", "code", "needle"), [
    (["trian"], 2, "Did you mean 'train'?"),
    (["train", "small.yaml", "--adress", "x"], 2, "--address"),
    (["train", "smal.yaml"], 2, "did you mean small.yaml?"),
    (["train", "small.yaml", "sampling.groupsize=8"], 2, "did you mean sampling.group_size?"),
    (["train", "small.yaml", "run.steps"], 2, "is not of the form section.key=value"),
    (["train", "small.yaml", "data.train_prompts=builtin:tiny/trian.txt"], 2, "did you mean train.txt?"),
    (["train", "small.yaml", "model.path=builtin:tony"], 2, "did you mean builtin:tiny?"),
    (["config", "small.yaml", "loss.bta=1"], 2, "did you mean loss.beta?"),
    (["rewards", "ocrr"], 2, "did you mean ocr?"),
    (["eval", "small.yaml", "--checkpoint", "latest"], 2, "/runs/small"),
    (["eval", "small.yaml", "--checkpoint", "1", "--adapter", "x"], 2, "give one of them"),
    (["eval", "small.yaml", "--adapter", "adapterz"], 2, "/adapters?"),
    (["eval", "small.yaml", "--ema"], 2, "--checkpoint latest"),
    (["eval", "small.yaml", "--address", "nowhere"], 1, "cannot connect to Ray at nowhere"),
    (["eval", "small.yaml", "data.eval_prompts=null"], 2, "data.eval_prompts is not set"),
    (["sample", "small.yaml", "--out", "x"], 2, "--prompt TEXT"),
    (["sample", "--prompt", "x"], 2, "--model PATH"),
    (["sample", "small.yaml", "--prompt", "x", "--kernel", "flowsde"], 2, "sampling.kernel"),
    (["sample", "small.yaml", "--prompt", "x", "--height", "33"], 2, "the nearest is 32"),
    (["sample", "small.yaml", "--prompts", "promts.txt"], 2, "did you mean prompts.txt?"),
    (["export", "run", "--out", "x"], 2, "did you mean runs?"),
    (["export", "runs"], 2, "--out"),
    (["export", "s4://bucket/run", "--out", "x"], 2, "the choices are file, s3, gs"),
    (["report", "run"], 2, "did you mean runs?"),
])
def test_wrong_input_is_named_without_a_traceback(tmp_path, monkeypatch, args, code, needle):
    write_config(tmp_path, run={"name": "small", "dir": "runs", "steps": 2})
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = cli(*args, code=code)
    assert needle in result.stderr
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)


# A run ----------------------------------------------------------------------------------------------------------------

def test_train_shows_a_clean_screen(trained):
    folder, _, run_dir, out, err = trained
    assert err == ""
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)"
    lines = [found[1] if (found := re.fullmatch(stamp, line)) else line for line in out.splitlines()]
    assert lines[0].startswith("run small: 2 steps of 2 groups x 4 images, in ")
    assert lines[1].startswith("flowgrpo-ray ") and ", ray " in lines[1]
    assert any(line.startswith("jpeg_compressibility is the only reward and nothing else is measured") for line in lines)
    assert "starting 3 actors" in lines
    rows = [line for line in lines if re.match(r"step \d/2  .*evaluation: |step \d/2  .*images/s", line)]
    assert [line[:8] for line in rows] == ["step 0/2", "step 1/2", "step 2/2"], out
    row = read_metrics(str(run_dir))[-1]
    assert f"jpeg_compressibility {row['reward_mean/jpeg_compressibility']:.4f}" in rows[2]
    assert f"evaluation: jpeg_compressibility {row['eval/policy/jpeg_compressibility']:.4f}" in rows[2]


def test_train_ends_with_what_was_reached_and_where_it_is(trained):
    _, _, run_dir, out, _ = trained
    rows = read_metrics(str(run_dir))
    for weights in ("policy", "ema"):
        key = f"eval/{weights}/jpeg_compressibility"
        line = next(line for line in out.splitlines() if "jpeg_compressibility" in line and f" {weights} " in line
                    and "±" in line)
        assert f"{rows[0][key]:.4f}" in line and f"{rows[-1][key]:.4f}" in line
    assert "trained 2 steps in" in out
    places = ("report.html", "samples/grids/policy_step_000000.png", "samples/grids/policy_step_000002.png",
              "checkpoints/step_2/adapter")
    for place in places:
        assert str(run_dir / place) in out and (run_dir / place).exists()


def test_the_same_command_again_says_that_all_is_done(trained):
    _, config, run_dir, _, _ = trained
    text = cli("train", config).output
    assert "this run is done: 2 steps" in text and str(run_dir / "report.html") in text


def test_another_configuration_under_the_same_name_is_refused(trained):
    _, config, run_dir, _, _ = trained
    result = cli("train", config, "train.seed=1", code=2)
    assert "train.seed: 42 -> 1" in result.stderr and "Traceback" not in result.output
    assert "run.resume is never" in cli("train", config, "run.resume=never", code=2).stderr


def test_report_is_written_again(trained):
    run_dir = trained[2]
    (run_dir / "report.html").unlink()
    assert cli("report", run_dir).output.strip() == str(run_dir / "report.html")
    assert "small" in (run_dir / "report.html").read_text()


def test_evaluation_of_a_checkpoint_is_the_one_of_training(trained, ray_cluster, tmp_path):
    _, config, run_dir, _, _ = trained
    before, _, last = read_metrics(str(run_dir))
    grid = tmp_path / "grid.png"
    result = json.loads(cli("eval", config, "--checkpoint", "latest", "--ema", "--json", "--grid", grid).stdout)
    assert result["images"] == 6 and result["images_without_score"] == 0
    assert result["scores"]["jpeg_compressibility"] == {
        "mean": last["eval/ema/jpeg_compressibility"], "std": last["eval_std/ema/jpeg_compressibility"]}
    assert grid.read_bytes() == (run_dir / "samples/grids/ema_step_000002.png").read_bytes()
    table = cli("eval", config, "pools.placement=colocated").stdout  # the base model, on learners' resources
    assert table.startswith("base model on builtin:tiny/heldout.txt: 6 images\n")
    assert f"{before['eval/policy/jpeg_compressibility']:.4f}" in table


def test_a_configuration_in_a_run_folder_means_that_run(trained, tmp_path, monkeypatch):
    moved = tmp_path / "moved"
    shutil.copytree(trained[2], moved)
    monkeypatch.chdir(tmp_path)  # a relative run.dir would be another place from here
    result = cli("train", moved / "config.yaml", "run.steps=2")
    assert "this run is done: 2 steps" in result.output and str(moved) in result.output
    result = cli("eval", "moved/config.yaml", "--checkpoint", "7", code=2)
    assert "no checkpoint of step 7; the nearest is 2" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved"]


def test_a_model_without_a_configuration_samples_at_its_own_size(tmp_path):
    folder = tiny_pipelines.build("sd3_no_t5", tmp_path / "pipeline")
    cli("sample", "--model", "builtin:tiny", "--prompt", 'the word "RAY"', "-n", "1", "--steps", "1", "--out", tmp_path / "a")
    assert Image.open(tmp_path / "a/00_00.png").size == (64, 32)
    cli("sample", "--model", folder, "--prompt", "a cat", "-n", "1", "--steps", "1", "--width", "32", "--out",
        tmp_path / "b")
    assert Image.open(tmp_path / "b/00_00.png").size == (32, 64), "16 latent cells of 4 pixels high"


def test_samples_are_those_of_the_evaluation(trained, tmp_path):
    folder, config, run_dir, _, _ = trained
    prompts = [f'the word "{word}"' for word in _heldout(6)]
    (tmp_path / "six.txt").write_text("\n".join(prompts))
    args = ("sample", config, "--prompts", tmp_path / "six.txt", "-n", "1", "--seed", "1234")
    adapter = run_dir / "checkpoints/step_2/adapter"
    paths = cli(*args, "--adapter", adapter, "--out", tmp_path / "a", "--float").stdout.split()
    pngs = [Path(path) for path in paths if path.endswith(".png")]
    assert [path.name for path in pngs] == [*(f"{i:02d}_00.png" for i in range(6)), "grid.png"]
    assert _in_grid(tmp_path / "a/grid.png") == _in_grid(run_dir / "samples/grids/policy_step_000002.png")
    assert [prompt for _, prompt, _ in _in_grid(tmp_path / "a/grid.png")] == prompts
    for path, (pixels, _, _) in zip(pngs, _in_grid(tmp_path / "a/grid.png"), strict=False):
        assert np.asarray(Image.open(path)).tobytes() == pixels
    floats = np.load(pngs[0].with_suffix(".npy"))
    assert floats.dtype == np.float32 and floats.shape == (3, 32, 64) and floats.min() >= 0 and floats.max() <= 1
    assert np.array_equal((floats.transpose(1, 2, 0) * 255).round().astype(np.uint8), np.asarray(Image.open(pngs[0])))
    cli(*args, "--out", tmp_path / "b")
    assert _in_grid(tmp_path / "b/grid.png") == _in_grid(run_dir / "samples/grids/policy_step_000000.png")


def _in_grid(path):
    """Pixels, prompt and seed of every image of a grid."""
    return [(np.asarray(Image.open(io.BytesIO(item.png))).tobytes(), item.prompt, item.seed)
            for item in read_grid(path.read_bytes())]


def test_samples_by_an_sde_differ_from_the_ode(tmp_path):
    common = ("sample", "--model", "builtin:tiny", "model.max_sequence_length=1", "--height", 32, "--width", 64,
              "--steps", 4, "--prompt", 'the word "CAT"', "-n", 2)
    ways = {"ode": (), "sde": ("--kernel", "flow_sde"), "quiet": ("--kernel", "cps", "--noise-level", 1e-6)}
    images = {}
    for name, options in ways.items():
        cli(*common, *options, "--out", tmp_path / name)
        images[name] = np.asarray(Image.open(tmp_path / name / "00_01.png")).astype(int)
    assert np.abs(images["ode"] - images["sde"]).mean() > 10
    assert np.abs(images["ode"] - images["quiet"]).max() <= 1, "without noise an SDE is the ODE"


def test_export_is_what_diffusers_loads(trained, tmp_path):
    _, _, run_dir, _, _ = trained
    out = tmp_path / "adapter"
    text = cli("export", run_dir, "--out", out).output
    assert text.startswith("adapter of step 2: ")
    file = out / "pytorch_lora_weights.safetensors"
    assert file.read_bytes() == (run_dir / "checkpoints/step_2/adapter" / file.name).read_bytes()
    code: dict[str, object] = {}
    exec(text.split("\n\n", 1)[1], code)  # the printed Python, as a reader would paste it
    assert code["image"].size == (64, 32)
    config = next(iter(code["pipe"].transformer.peft_config.values()))
    assert (config.r, config.lora_alpha) == (4, 8)
    cli("export", run_dir, "--step", "1", "--ema", "--out", out)
    ema = load_adapter(out)[0]
    held = load_adapter(run_dir / "checkpoints/step_1/ema")[0]
    assert all(np.array_equal(ema[key], held[key]) for key in held)


def test_export_for_other_loaders(trained, tmp_path):
    run_dir = trained[2]
    cli("export", run_dir, "--out", tmp_path / "own")
    arrays, settings = load_adapter(tmp_path / "own")
    assert settings.alpha == 2 * settings.rank
    text = cli("export", run_dir, "--out", tmp_path, "--format", "comfyui", "--ema").output
    assert f"EMA adapter of step 2: {tmp_path}/small-step2-ema.safetensors" in text and "pipe" not in text
    cli("export", run_dir, "--out", tmp_path, "--format", "kohya")
    comfyui, kohya = (load_file(tmp_path / f"small-step2{end}.safetensors") for end in ("-ema", ""))
    assert {float(value) for key, value in comfyui.items() if key.endswith(".alpha")} == {settings.alpha}
    assert len(comfyui) == len(arrays) * 3 // 2
    assert float(kohya["lora_unet_joint_blocks_0_x_block_attn_qkv.alpha"]) == 3 * settings.alpha
    text = cli("export", run_dir, "--out", tmp_path / "folded", "--fold-alpha").output
    assert "load_lora_weights" in text
    folded, found = load_adapter(tmp_path / "folded")
    assert found.alpha == found.rank == settings.rank
    for key, array in arrays.items():
        assert np.array_equal(folded[key], array * (2 if ".lora_B." in key else 1))
    result = cli("export", run_dir, "--out", tmp_path, "--format", "kohia", code=2)
    assert "--format 'kohia' is unknown; did you mean kohya?" in result.stderr


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_exported_adapter_makes_the_samples_in_diffusers(trained, tmp_path, guidance):
    """`flowgrpo-ray sample --float` against the stock pipeline with the exported file, at the same latents and batch."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    from flowgrpo_ray import tiny
    from flowgrpo_ray.data.plan import noise_seed
    from flowgrpo_ray.sampling.noise import draw

    _, config, run_dir, _, _ = trained
    adapter, prompts = tmp_path / "adapter", ['the word "CAT"', 'the word "OWL"']
    cli("export", run_dir, "--out", adapter)
    paths = cli("sample", config, "--prompt", prompts[0], "--prompt", prompts[1], "-n", 2, "--seed", 5, "--guidance", guidance,
                "--adapter", adapter, "--out", tmp_path / "out", "--float").stdout.split()
    ours = np.stack([np.load(path) for path in paths if path.endswith(".npy")])
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        tiny.model_dir(), dtype=torch.float32, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    latents = draw([noise_seed(5, 0, p, i, "eval", -1) for i in (0, 1) for p in (0, 1)], (4, 8, 16))

    def stock() -> np.ndarray:
        return pipeline(prompts * 2, height=32, width=64, num_inference_steps=4, output_type="pt",
                        guidance_scale=guidance, max_sequence_length=1, latents=latents).images.numpy()

    assert ours.shape == (4, 3, 32, 64) and np.abs(ours - stock()).max() > 1e-3, "the adapter makes a difference"
    pipeline.load_lora_weights(str(adapter))
    assert np.abs(ours - stock()).max() <= 1e-5


def test_a_prompt_in_another_encoding_is_rejected(tmp_path):
    (tmp_path / "a.yaml").write_text("rewards: {ocr: {}}\n")
    prompt = os.fsdecode('ein Schild "GR\u00d6SSE"'.encode("latin-1"))
    result = cli("sample", tmp_path / "a.yaml", "--prompt", prompt, "--out", tmp_path / "out", code=2)
    assert "is not valid UTF-8 (the byte 0xd6)" in result.stderr and not (tmp_path / "out").exists()


def test_a_configuration_comes_through_a_pipe():
    text = cli("config", "-", "--plain", "train.seed=7", input="rewards: {ocr: {weight: 2}}\n").output
    assert "weight: 2.0" in text and "seed: 7" in text
    assert "the standard input is empty" in cli("config", "-", input="", code=2).stderr


def test_export_names_the_nearest_checkpoint(trained, tmp_path):
    result = cli("export", trained[2], "--step", "9", "--out", tmp_path, code=2)
    assert "no checkpoint of step 9; the nearest is 2 (there are 1, 2)" in result.stderr
    result = cli("export", trained[2], "--step", "last", "--out", tmp_path, code=2)
    assert "neither a number nor latest" in result.stderr


def test_a_truncated_checkpoint_is_refused(trained, tmp_path):
    run_dir = tmp_path / "broken"
    shutil.copytree(trained[2], run_dir)
    for step in (1, 2):
        file = run_dir / f"checkpoints/step_{step}/adapter/pytorch_lora_weights.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    result = cli("export", run_dir, "--step", "2", "--out", tmp_path / "out", code=1)
    assert "adapter/pytorch_lora_weights.safetensors is truncated" in result.stderr
    assert "holds no complete checkpoint" in cli("export", run_dir, "--out", tmp_path / "out", code=1).stderr
    assert not (tmp_path / "out").exists() and "Traceback" not in result.output


def _heldout(count: int) -> list[str]:
    from flowgrpo_ray.data.prompts import load_prompts

    return [record.prompt.split('"')[1] for record in load_prompts("builtin:tiny/heldout.txt")[:count]]
