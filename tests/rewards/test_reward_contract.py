import math
import subprocess
import sys

import numpy as np
import pytest
from answering import serving

from flowgrpo_ray import rewards
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import Option, Reward, RewardError, base
from flowgrpo_ray.rewards import registry as reward_registry


class Constant(Reward):
    name = "constant"
    range = (0.0, 1.0)
    options = {
        "level": Option(0.5, "what every image scores", kind=float, minimum=0),
        "flag": Option(False, "a switch", kind=bool),
        "path": Option(None, "a file"),
    }

    def score(self, images, prompts, metadata, *, group_ids=None):
        return {"constant": np.full(base.check_batch(images, prompts, metadata), self.settings["level"], np.float32)}


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(reward_registry, "_REGISTRY", dict(reward_registry._REGISTRY))


# Options without a right default: where the server is.
NEEDED = {"url": "http://127.0.0.1:8123", "base_url": "http://127.0.0.1:8000/v1"}


def images(n):
    return np.zeros((n, 8, 8, 3), np.uint8)


@pytest.mark.parametrize("name", rewards.known_rewards())
def test_every_registered_class_states_the_contract(name):
    cls = rewards.reward_class(name)
    assert cls.name == name and cls.scope in ("sample", "group") and cls.description
    low, high = cls.range
    assert low < high
    assert all(isinstance(package, str) for package in cls.packages)
    options = {key: option.default for key, option in cls.options.items()}
    assert rewards.option_problems(name, options | {key: url for key, url in NEEDED.items() if key in options}) == []


def loaded(code):
    """Top-level modules outside the standard library that are loaded once `code` has run in a fresh interpreter."""
    tail = "\nimport sys; print(' '.join({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    out = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}{tail}"],
                         check=True, capture_output=True, text=True).stdout
    return {name for name in out.split() if not name.startswith("_")}


def test_base_imports_only_the_standard_library_and_numpy():
    assert loaded("import flowgrpo_ray.rewards.base") == {"flowgrpo_ray", "numpy"}


def test_options_and_prompts_are_checked_without_loading_a_model():
    code = ("from flowgrpo_ray import rewards; assert rewards.option_problems('ocr', {'mode': 'ful'}); "
            "assert rewards.reward_class('ocr').check_prompt('no quotes', {})")
    # The recogniser's characters are read from its ONNX file the first time, and from inference.yml after that.
    reads_characters = {"onnxruntime", "yaml", "cython_runtime"}
    assert loaded(code) - reads_characters == {"flowgrpo_ray", "numpy"}


def test_unknown_reward_names_the_nearest():
    with pytest.raises(ConfigError, match="no reward is named 'orc'; did you mean ocr"):
        rewards.get("orc")
    with pytest.raises(ConfigError, match="the choices are ocr, video_ocr, jpeg_compressibility"):
        rewards.option_problems("zebra", {})


@pytest.mark.parametrize(("options", "message"), [
    ({"thread": 2}, "no option 'thread'; did you mean threads?"),
    ({"mode": "recognise"}, "the choices are full, recognition; did you mean recognition?"),
    ({"mode": 3}, "option mode is 3; the choices are full, recognition"),
    ({"threads": 0}, "option threads is 0; use at least 1"),
    ({"threads": "2"}, "option threads is '2', not of type int"),
    ({"threads": True}, "option threads is True, not of type int"),
    ({"threads": None}, "option threads is None, not of type int"),
    ({"width": 80}, "option width means nothing with mode: full"),
    ({"mode": "recognition", "det_model_dir": "x"}, "option det_model_dir means nothing with mode: recognition"),
])
def test_wrong_options_are_named(options, message):
    (problem,) = rewards.option_problems("ocr", options)
    assert message in problem
    with pytest.raises(ConfigError) as error:
        rewards.get("ocr", **options)
    assert message in str(error.value)


def test_all_problems_come_at_once():
    assert len(rewards.option_problems("ocr", {"thread": 1, "mode": "x", "batch_size": 0})) == 3
    with pytest.raises(ConfigError, match="no option 'quality'; it has none"):
        rewards.get("jpeg_compressibility", quality=95)


def test_register_makes_a_reward_available(registry):
    rewards.register("constant", Constant)
    rewards.register("constant", Constant)
    assert rewards.known_rewards()[-1] == "constant"
    assert rewards.get("constant").score(images(2), ["a", "b"], [{}, {}])["constant"].tolist() == [0.5, 0.5]
    assert rewards.get("constant", level=1, flag=True, path="x").settings == {"level": 1, "flag": True, "path": "x"}
    assert len(rewards.option_problems("constant", {"level": -1.0, "flag": 1, "path": 2})) == 3
    assert len(rewards.option_problems("constant", {"level": math.nan})) == 1


@pytest.mark.parametrize(("value", "problem"), [
    (0.5, None), (1, None), (250_000, None), (0.4, "is 0.4; use at least 0.5"),
    (250_001, "is 250001; use at most 250000"), (1e300, "is 1e+300; use at most 250000"),
])
def test_bounds_of_an_option(value, problem):
    assert Option(1.0, "a number", kind=float, minimum=0.5, maximum=250_000).problem(value) == problem


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400])
def test_a_number_that_is_none_is_refused(value, tmp_path, monkeypatch):
    (tmp_path / "numbers_of_mine.py").write_text(
        "def mine(images, prompts, metadata, *, gain=1, cap=float('inf')):\n    return 0\n")
    monkeypatch.chdir(tmp_path)
    for name, options, key in (("numbers_of_mine:mine", {"gain": value}, "gain"),
                               ("remote", {"url": "http://x", "timeout_s": value}, "timeout_s"),
                               ("vlm_judge", {"base_url": "http://x/v1", "scale": [value, value]}, "scale"),
                               ("vlm_judge", {"base_url": "http://x/v1", "scale": [0, value]}, "scale"),
                               ("vlm_judge", {"base_url": "http://x/v1", "temperature": value}, "temperature")):
        (problem,) = rewards.option_problems(name, options)
        assert f"option {key} is " in problem, problem
        if key != "scale":
            assert "not a finite number; the default is" in problem or value < 0, problem
    assert rewards.option_problems("numbers_of_mine:mine", {"cap": math.inf}) == [], "its own default is right"


class Leaving(Reward):
    """Ends the process, or tries to, where its option says."""

    name = "leaving"
    range = (0.0, 1.0)
    options = {"where": Option("score", "where it does")}

    def __init__(self, **options):
        super().__init__(**options)
        if self.settings["where"] == "load":
            sys.exit("no weights")

    def self_test_case(self):
        if self.settings["where"] == "case":
            sys.exit()
        return base.red_above_blue()

    def score(self, images, prompts, metadata, *, group_ids=None):
        if self.settings["where"] == "interrupt":
            raise KeyboardInterrupt
        sys.exit(0)


def test_code_of_ones_own_that_calls_exit_is_an_error_that_names_the_reward(registry, tmp_path, monkeypatch):
    rewards.register("leaving", Leaving)
    with pytest.raises(RewardError, match=r"reward leaving called sys.exit\('no weights'\)"):
        rewards.get("leaving", where="load")
    for where, code in (("score", "0"), ("case", "None")):
        with pytest.raises(RewardError, match=rf"reward leaving called sys.exit\({code}\)"):
            rewards.get("leaving", where=where).self_test()
    with pytest.raises(KeyboardInterrupt):
        rewards.get("leaving", where="interrupt").self_test()
    (tmp_path / "leaving_mine.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    for entry in ("leaving_mine:f", "elsewhere"):
        reward_registry._REGISTRY["elsewhere"] = "leaving_mine:f"
        with pytest.raises(ConfigError, match="cannot be imported: SystemExit: 0"):
            rewards.reward_class(entry)


def test_register_by_name_imports_late(registry):
    rewards.register("other", "no_such_package.module:Other")
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"):
        rewards.get("other")


@pytest.mark.parametrize(("name", "cls", "message"), [
    ("ocr", Constant, "already registered"),
    ("other", Constant, "the two must agree"),
    ("constant", dict, "no subclass of Reward"),
    ("constant", "package.module", "not of the form module:Class"),
])
def test_register_refuses(registry, name, cls, message):
    with pytest.raises(ConfigError, match=message):
        rewards.register(name, cls)


def test_validated_gives_float64_in_the_same_order():
    out = rewards.validated({"r": np.array([0.5, 1], np.float32), "a": [0, 1], "b": np.array([True, False])}, 2, "r")
    assert list(out) == ["r", "a", "b"]
    assert all(values.dtype == np.float64 and values.shape == (2,) for values in out.values())
    assert out["b"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("result", "message"), [
    (None, "returned a NoneType"),
    (np.zeros(3), "returned a ndarray"),
    ({}, "returned no key 'r'"),
    ({"ocr": np.zeros(3)}, "returned no key 'r'"),
    ({"m": np.zeros(3), "r": np.zeros(3)}, "as the first key"),
    ({"r": np.zeros(3), 1: np.zeros(3)}, "keys are strings"),
    ({"r": np.zeros(2)}, r"has shape \[2\], not \[3\]"),
    ({"r": np.zeros((3, 1))}, r"has shape \[3, 1\]"),
    ({"r": 0.5}, r"has shape \[\]"),
    ({"r": [0.1, None, 0.2]}, "not numbers"),
    ({"r": ["1", "2", "3"]}, "not numbers"),
    ({"r": np.array([1, 2, 3j])}, "not numbers"),
    ({"r": [[1], [2, 3], 4]}, "no array of numbers"),
    ({"r": [0.0, math.nan, 1.0]}, r"is nan at \[1\] of 3"),
    ({"r": [math.inf, 0.0, -math.inf]}, r"is inf at \[0, 2\] of 3"),
    ({"r": np.zeros(3), "m": [0, 0, math.nan]}, "'m' is nan"),
    ({"r": np.ma.array([0.1, 0.2, 0.0], mask=[False, False, True])}, r"'r' is masked at \[2\], so 1 of 3 images"),
    ({"r": np.zeros(3), "m": [1, np.ma.masked, np.ma.array(0, mask=True)]}, "'m' is masked, so 2 of 3 images"),
])
def test_validated_refuses_what_is_no_score(result, message):
    with pytest.raises(RewardError, match=message):
        rewards.validated(result, 3, "r")


def test_masked_arrays_without_a_masked_entry_are_scores():
    out = rewards.validated({"r": np.ma.array([1.0, 2.0]), "m": [np.ma.array(3.0), 4.0]}, 2, "r")
    assert out["r"].tolist() == [1, 2] and out["m"].tolist() == [3, 4]


@pytest.mark.parametrize(("bounds", "score", "right"), [
    ((0.0, 1.0), -1.0, False), ((0.0, 1.0), 1.001, False), ((0.0, 1.0), 1.0000005, True), ((0.0, 1.0), 0.0, True),
    ((-math.inf, 0.0), 1.0, False), ((-math.inf, 0.0), -1e9, True), ((0.0, math.inf), -10.0, False),
    ((-math.inf, math.inf), -1.0, True), (None, -1.0, True), ((0.0, 255.0), 255.0001, True), ([0, 1], 2.0, False),
])
def test_a_score_outside_the_declared_range_is_no_score(bounds, score, right):
    result = {"r": [bounds[0] if bounds and math.isfinite(bounds[0]) else 0.0, score], "r_monitor": [-1.0, 1e9]}
    if right:
        assert rewards.validated(result, 2, "r", range=bounds)["r"][1] == score
        return
    with pytest.raises(RewardError, match=r"reward r: .* is outside .* so it is no score .* at \[1\] of 2 images"):
        rewards.validated(result, 2, "r", range=bounds)


@pytest.mark.parametrize("value", [-10, 0, 5.5])
def test_a_sentinel_of_a_server_is_no_score(value):
    replies = {"/health": {"name": "deqa", "range": [1, 5], "scope": "sample"},
               "/v1/score": {"scores": {"deqa": [3.25, value]}}}
    with serving(lambda method, path, body: (200, replies[path])) as server:
        reward = rewards.get("deqa", url=server.url)
        result = reward.score(images(2), ["", ""], [{}, {}])
        with pytest.raises(RewardError, match=rf"reward deqa: {value:g} is outside 1 to 5, so it is no score .*at \[1\] of 2"):
            rewards.validated(result, 2, "deqa", range=reward.range)


def test_what_has_no_sure_bound_declares_none():
    assert all(rewards.reward_class(name).range == (-math.inf, math.inf) for name in ("aesthetic", "image_reward"))


@pytest.mark.parametrize(("images", "prompts", "message"), [
    (np.zeros((2, 8, 8, 3), np.float32), ["a", "b"], "not float32"),
    (np.zeros((2, 3, 8, 8), np.uint8), ["a", "b"], r"not uint8 \[2, 3, 8, 8\]"),
    (np.zeros((8, 8, 3), np.uint8), ["a"], r"not uint8 \[8, 8, 3\]"),
    ([images(1)], ["a"], "not list"),
    (images(2), ["a"], "2 images, 1 prompt and"),
])
def test_a_malformed_batch_is_refused(images, prompts, message):
    with pytest.raises(RewardError, match=message):
        rewards.get("jpeg_compressibility").score(images, prompts, [{}] * len(prompts))


def test_functions_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def red(images, prompts, metadata, *, gain=1.0):\n    '''How red.'''\n"
        "    return images[..., 0].mean(axis=(1, 2)) * gain\n"
        "def named(images, prompts, metadata):\n    return {'main': [1.0] * len(images), 'other': [2.0] * len(images)}\n"
        "def two(images, prompts):\n    return 0\n"
        "def needs(images, prompts, metadata, extra):\n    return 0\n"
        "LIST = []\n"
        "from builtins import min as builtin\n"
        "class Box:\n    def red(images, prompts, metadata):\n        return [9.0] * len(images)\n"
        "def early(images, prompts, metadata):\n    return {'other': [2.0], 'early': [1.0]}\n"
        "def scoped(images, prompts, metadata):\n    return 0\nscoped.scope = 'goup'\n"
        "def ranged(images, prompts, metadata):\n    return 0\nranged.range = (1, 0)\n"
        "def placed(images, /, prompts, metadata):\n    return 0\n")
    (tmp_path / "broken_mine.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    reward = rewards.get("mine:red", gain=2.0)
    assert reward.score(images(2) + np.uint8(3), ["", ""], [{}, {}])["red"].tolist() == [6.0, 6.0]
    assert rewards.reward_class("mine:red").description == "How red." and reward.name == "red"
    assert rewards.option_problems("mine:red", {"gane": 1}) == ["reward red has no option 'gane'; did you mean gain?"]
    assert rewards.get("mine:named").score(images(1), [""], [{}]) == {"named": [1.0], "other": [2.0]}
    assert rewards.get("mine:Box.red").score(images(1), [""], [{}]) == {"red": [9.0]}
    with pytest.raises(RewardError, match="returned 'other' as the first key"):
        rewards.validated(rewards.get("mine:early").score(images(1), [""], [{}]), 1, "early")
    for name, message in (("mine:rde", "has no 'rde'; did you mean red"), ("mine:two", "lacks the parameter metadata"),
                          ("mine:needs", "parameter extra of the function needs a default"), ("mine:LIST", "is a list"),
                          ("nowhere_at_all:f", "cannot be imported"),
                          ("broken_mine:f", "cannot be imported: ZeroDivisionError"),
                          ("mine:scoped", "scope is 'goup'; did you mean group"), ("mine:ranged", r"range is \(1, 0\), not"),
                          ("mine:placed", "parameter images of the function is positional only"),
                          ("mine:builtin", "no signature found .*; call it from a function of the form builtin"),
                          ("mine:Box.rde", "has no 'Box.rde'"), ("mine:", "not of the form module:Class")):
        with pytest.raises(ConfigError, match=message):
            rewards.reward_class(name)


def test_rewards_of_installed_packages(tmp_path, monkeypatch):
    (tmp_path / "plugged.py").write_text(
        "def sparkle(images, prompts, metadata):\n    return [0.5] * len(images)\nclass Box:\n    glow = sparkle\n")
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowgrpo_ray.rewards]\nsparkle = plugged:sparkle\n"
                                           "nested = plugged:Box.glow [more]\nabsent = plugged:nothing\n")
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from flowgrpo_ray import rewards; import numpy as np; "
            "assert 'sparkle' in rewards.known_rewards(); "
            "print([rewards.get(n).score(np.zeros((1, 4, 4, 3), np.uint8), [''], [{}]) for n in ('sparkle', 'nested')]); "
            "rewards.get('absent')")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "[{'sparkle': [0.5]}, {'nested': [0.5]}]"
    assert "ConfigError: reward 'absent' (plugged:nothing) cannot be imported: AttributeError: " in done.stderr


class Falling(Reward):
    """Scores what its option says, one image after the other."""

    name = "falling"
    range = (0.0, 1.0)
    options = {"scores": Option((), "in order", kind=object), "per_batch": Option(0.0, "added per image", kind=float)}

    def self_test_case(self):
        return rewards.SelfTest(np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((3, 4, 4, 3), np.uint8), ("",) * 3)

    def score(self, images, prompts, metadata, *, group_ids=None):
        scores = np.array([self.settings["scores"][image[0, 0, 0]] for image in images])
        return {"falling": scores + len(images) * self.settings["per_batch"]}


@pytest.mark.parametrize(("scores", "message"), [
    ([0.9, 0.5, 0.1], None), ([0.9, 0.5, 0.5], "from high to low"), ([0.1, 0.5, 0.9], "from high to low"),
    ([1.5, 0.5, 0.1], "outside 0 to 1"), ([1e13, 0.5, 0.1], r"is 1e\+13, which is no score"),
    ([0.9, math.nan, 0.1], "is nan at"),
])
def test_the_self_test(scores, message):
    reward = Falling(scores=scores)
    if message is None:
        reward.self_test()
        return
    with pytest.raises(RewardError, match=message):
        reward.self_test()


@pytest.mark.parametrize("function", ["in_place", "unlocks"])
def test_the_self_test_gives_read_only_images_as_a_run_does(function):
    reward = rewards.get(f"own_rewards:{function}")
    with pytest.raises(ValueError, match="read-only|cannot set WRITEABLE"):
        reward.self_test()
    assert reward.self_test_case().images.flags.writeable, "its own are its own"


def test_the_self_test_measures_batch_invariance(monkeypatch):
    Falling(scores=[0.9, 0.5, 0.1], per_batch=0.01).self_test()
    monkeypatch.setattr(Falling, "batch_invariant", True)
    Falling(scores=[0.9, 0.5, 0.1]).self_test()
    with pytest.raises(RewardError, match="declared batch_invariant, and its scores depend on the batch"):
        Falling(scores=[0.9, 0.5, 0.1], per_batch=0.01).self_test()


def of(**attributes):
    return type("Mine", (Constant,), {"name": "mine", **attributes})


class Bare(Reward):
    name = "mine"

    def score(self, images, prompts, metadata, *, group_ids=None):
        return {"mine": np.zeros(len(images))}


@pytest.mark.parametrize(("cls", "message"), [
    (of(scope="groups"), "scope is 'groups'; did you mean group"),
    (of(device="gpu"), "device is 'gpu', neither 'cpu' nor 'any'"),
    (of(batch_size=0), "batch_size is 0, not a whole number of images, 1 or more"),
    (of(batch_size=2.5), "batch_size is 2.5, not a whole number"),
    (of(batch_size=True), "batch_size is True, not a whole number"),
    (of(options={"batch_size": Option(0, "images", kind=int)}), "the default of option batch_size is 0, not a whole number"),
    (of(options=["level"]), r"options is \['level'\], not a dict of Option by name"),
    (of(options={"level": 0.5}), "options is {'level': 0.5}, not a dict of Option by name"),
    (Bare, "it has no range; state"),
    (of(range=(1.0, 0.0)), r"range is \(1.0, 0.0\), not \(lowest, highest\)"),
    (of(range=(math.nan, 1.0)), r"range is \(nan, 1.0\), not"),
    (of(range=("0", "1")), "range is .*, not"),
    (of(range=1.0), "range is 1.0, not"),
    (type("Mine", (Reward,), {"name": "mine", "range": (0, 1)}), "it has no method score"),
])
def test_a_class_that_breaks_the_contract(registry, cls, message):
    with pytest.raises(ConfigError, match=f"reward 'mine': {cls.__name__}: {message}"):
        rewards.register("mine", cls)


def test_options_are_checked_and_kept_before_the_init_of_ones_own(registry):
    def init(self, level=None):
        self.seen = self.settings["level"]

    rewards.register("mine", of(__init__=init))
    assert rewards.get("mine").seen == 0.5 and rewards.get("mine", level=0.75).seen == 0.75
    with pytest.raises(ConfigError, match="reward mine has no option 'levl'; did you mean level"):
        rewards.get("mine", levl=1.0)


def test_a_range_that_an_instance_sets_is_checked(registry):
    def init(self, **options):
        Constant.__init__(self, **options)
        self.range = (1.0, self.settings["level"])

    rewards.register("mine", of(__init__=init))
    assert rewards.get("mine", level=2.0).range == (1.0, 2.0)
    with pytest.raises(ConfigError, match=r"reward 'mine': Mine: range is \(1.0, 0.5\), not"):
        rewards.get("mine")


def test_the_option_batch_size_of_ones_own(tmp_path, monkeypatch):
    head = "(images, prompts, metadata, *, batch_size="
    (tmp_path / "sized_mine.py").write_text(f"def four{head}4):\n    return 0\ndef none{head}None):\n    return 0\n"
                                            f"def zero{head}0):\n    return 0\n")
    monkeypatch.chdir(tmp_path)
    for value in (0, -1, 2.5, True):
        for name in ("four", "none"):
            (problem,) = rewards.option_problems(f"sized_mine:{name}", {"batch_size": value})
            assert f"reward {name}: option batch_size is {value!r}, not " in problem
    assert rewards.option_problems("sized_mine:four", {"batch_size": 2}) == []
    assert rewards.option_problems("sized_mine:none", {"batch_size": None}) == []
    with pytest.raises(ConfigError, match="reward 'zero': zero: the default of option batch_size is 0"):
        rewards.reward_class("sized_mine:zero")


def test_another_score_of_a_server_is_not_held_to_the_range_of_its_own():
    health = {"name": "served", "range": [0, 1], "scope": "sample"}
    with serving(lambda method, path, body: (200, health)) as server:
        assert rewards.get("remote", url=server.url).range == (0, 1)
        assert rewards.get("remote", url=server.url, score="served").range == (0, 1)
        assert rewards.get("remote", url=server.url, score="served_size").range == (-math.inf, math.inf)


@pytest.mark.parametrize(("where", "message"), [
    ("init", r"reward own_rewards:Breaking: its constructor fails: KeyError: 'weights' \(\S*own_rewards.py, line \d+\)$"),
    ("import", r"its constructor fails: ModuleNotFoundError: no module named lens \(\S*own_rewards.py, line \d+\)"
               "; it needs lens in the environment that it runs in$"),
    ("self_test", r"reward breaking: its self-test fails: ValueError: cannot reshape .* \(\S*own_rewards.py, line \d+\)$"),
    ("conflicts", r"reward breaking: its check of the options fails: KeyError: 'no such' \(\S*own_rewards.py, line \d+\)$"),
])
def test_what_goes_wrong_before_scoring_names_the_reward_and_the_place(where, message):
    with pytest.raises(RewardError, match=message) as error:
        base.self_tested(rewards.get("own_rewards:Breaking", where=where))
    assert error.value.__cause__ is not None and "\n" not in str(error.value)


def test_an_error_of_ours_stays_as_it_is():
    with pytest.raises(RewardError, match="^option where is 'chained':\nit is a chain$"):
        rewards.get("own_rewards:Breaking", where="chained")
    with pytest.raises(RewardError, match="^reward upside_down fails its self-test"):
        base.self_tested(rewards.get("upside_down:UpsideDown"))
