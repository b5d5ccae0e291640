import os
import subprocess
import sys
import time

import onnxruntime
import pytest
import yaml

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError, ocr_models


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flowgrpo-ray" / "ocr"


def test_a_gpu_is_used_only_where_the_engine_can(cache, monkeypatch):
    model = ocr_models.model_dir(ocr_models.RECOGNITION)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ocr_models.gpu_problem("onnxruntime", model) == "the process sees none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "this onnxruntime is a build for the CPU" in ocr_models.gpu_problem("onnxruntime", model)
    # A build for GPUs that finds no CUDA: it takes the CPU and only logs it.
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    assert "onnxruntime cannot use CUDA here" in ocr_models.gpu_problem("onnxruntime", model)
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: ["CUDAExecutionProvider"])
    assert ocr_models.gpu_problem("onnxruntime", model) is None
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    assert ocr_models.gpu_problem("onnxruntime", None) is None, "PaddleOCR downloads the model: there is none to try"


@pytest.mark.parametrize(("package", "command"), [
    ("rapidocr", "pip install --no-deps rapidocr==3.10.0"),
    ("paddleocr", "pip install 'flowgrpo-ray[ocr]'"),
    ("onnxruntime", "pip install 'flowgrpo-ray[ocr]'"),
])
def test_an_absent_package_prints_the_command_that_installs_it(package, command, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(RewardError) as error:
        rewards.get("ocr")
    assert package in str(error.value) and str(error.value).endswith(f"run: {command}")


def test_an_old_paddleocr_is_refused(cache, monkeypatch):
    monkeypatch.setattr(ocr_models.importlib.metadata, "version", lambda name: "2.10.0")
    with pytest.raises(RewardError, match=r"paddleocr >= 3.7, .*, not 2.10.0; run: pip install"):
        rewards.get("ocr")


def test_a_wheel_without_the_model_file_is_named(cache, monkeypatch):
    monkeypatch.setitem(ocr_models._FILES, ocr_models.DETECTION, "gone.onnx")
    with pytest.raises(RewardError, match="carries no gone.onnx; run: pip install --no-deps rapidocr==3.10.0"):
        ocr_models.model_dir(ocr_models.DETECTION)


def test_processes_that_start_at_once_share_one_folder(cache, tmp_path):
    code = (
        "import os, sys, time\n"
        "from flowgrpo_ray.rewards import ocr_models\n"
        "import onnxruntime\n"
        "open(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.001)\n"
        "directory = ocr_models.model_dir(ocr_models.RECOGNITION)\n"
        "print(directory, ocr_models.model_name(directory))\n"
    )
    ready, go = [tmp_path / f"ready{i}" for i in range(5)], tmp_path / "go"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(file), str(go)], stdout=subprocess.PIPE, text=True)
                 for file in ready]
    while not all(file.exists() for file in ready):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    go.touch()
    answers = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 5
    (answer,) = answers
    directory, name = answer.split()
    assert name == ocr_models.RECOGNITION
    assert os.listdir(cache) == [os.path.basename(directory)]  # no private folder is left behind
    assert sorted(os.listdir(directory)) == ["inference.onnx", "inference.yml"]


def test_a_folder_is_made_once(cache):
    first = ocr_models.model_dir(ocr_models.DETECTION)
    made = (first / "inference.yml").stat().st_mtime_ns
    assert ocr_models.model_dir(ocr_models.DETECTION) == first
    assert (first / "inference.yml").stat().st_mtime_ns == made


def test_the_alphabet_survives_yaml(cache):
    directory = ocr_models.model_dir(ocr_models.RECOGNITION)
    session = onnxruntime.InferenceSession(str(directory / "inference.onnx"), providers=["CPUExecutionProvider"])
    alphabet = session.get_modelmeta().custom_metadata_map["character"].split("\n")
    written = yaml.load((directory / "inference.yml").read_text("utf-8"), yaml.FullLoader)  # PaddleOCR's loader
    assert list(written["PostProcess"]["character_dict"]) == alphabet
    # the classes are: blank, the alphabet, space
    assert session.get_outputs()[0].shape[-1] == len(alphabet) + 2


def test_a_damaged_folder_is_named_and_left_alone(cache):
    directory = ocr_models.model_dir(ocr_models.DETECTION)
    (directory / "inference.yml").unlink()
    with pytest.raises(RewardError, match="delete it if it is damaged"):
        ocr_models.model_dir(ocr_models.DETECTION)
    assert os.listdir(cache) == [directory.name]


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RewardError, match="point XDG_CACHE_HOME at a writable folder"):
        ocr_models.model_dir(ocr_models.DETECTION)


@pytest.mark.parametrize(("files", "message"), [
    ({}, "it holds no inference.yml"),
    ({"inference.yml": "Global: {model_name: m}"}, "it holds no inference.onnx"),
    ({"inference.yml": "Global: {}", "inference.onnx": ""}, "states no Global.model_name"),
    ({"inference.yml": "", "inference.onnx": ""}, "states no Global.model_name"),
])
def test_a_folder_of_another_layout_is_refused(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RewardError, match=message):
        rewards.get("ocr", rec_model_dir=str(tmp_path))


@pytest.mark.parametrize("options", [{"lang": "klingon"}, {"det_model_dir": "/nowhere"}, {"rec_model_dir": "/nowhere"},
                                     {"mode": "recognition", "rec_model_dir": "/nowhere"}])
@pytest.mark.parametrize("name", ["ocr", "video_ocr"])
def test_an_option_that_paddleocr_cannot_start_with_is_named(name, options, cache):
    key, value = list(options.items())[-1]
    with pytest.raises(RewardError, match=rf"^reward {name}: option {key}='{value}': \S"):
        rewards.get(name, **options)


def test_a_damaged_model_is_named_with_its_option(cache, tmp_path):
    (tmp_path / "inference.yml").write_text(f"Global: {{model_name: {ocr_models.RECOGNITION}}}")
    (tmp_path / "inference.onnx").write_text("no model")
    with pytest.raises(RewardError, match=rf"^reward ocr: option rec_model_dir='{tmp_path}': .*Load model"):
        rewards.get("ocr", rec_model_dir=str(tmp_path))


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="onnxruntime can use a GPU here")
def test_a_gpu_that_cannot_be_used_is_named(cache):
    with pytest.raises(RewardError, match="^reward ocr: option device is gpu, and this onnxruntime is a build for the CPU"):
        rewards.get("ocr", device="gpu")


def test_a_language_whose_models_cannot_be_downloaded_is_named(tmp_path):
    nobody = "http://127.0.0.1:1"  # a port that nothing listens on
    code = ("from flowgrpo_ray import rewards\n"
            "try:\n    rewards.get('ocr', lang='fr')\n"
            "except rewards.RewardError as error:\n    print('found:', error)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {
        "XDG_CACHE_HOME": str(tmp_path), "PADDLE_PDX_CACHE_HOME": str(tmp_path / "paddlex")} | dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nobody))
    assert done.returncode == 0, done.stderr
    assert "found: reward ocr: option lang='fr': " in done.stdout and "download" in done.stdout.partition("found:")[2]


@pytest.mark.parametrize(("options", "message"), [
    ({"mode": "recognition", "width": 4097}, "reward ocr: option width is 4097; use at most 4096"),
    ({"threads": 257}, "reward ocr: option threads is 257; use at most 256"),
    ({"mode": "recognition", "width": 4096, "threads": 256}, None),
])
def test_numbers_that_no_machine_holds_are_refused(options, message):
    assert rewards.option_problems("ocr", options) == ([message] if message else [])


def test_loading_is_quiet_and_leaves_torch_out(cache):
    code = (
        "import sys, numpy as np\n"
        "from flowgrpo_ray import rewards\n"
        "for mode in ('full', 'recognition'):\n"
        "    rewards.get('ocr', mode=mode).score(np.zeros((2, 32, 64, 3), np.uint8), ['\"A\"'] * 2, [{}] * 2)\n"
        "assert not {'torch', 'transformers', 'rapidocr', 'modelscope'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
