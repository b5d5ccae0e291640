"""Every mistake is named, with the nearest right choice, before an actor starts."""

import os
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo_ray.config.load import Config, divisors, from_tree, load, to_yaml, yaml12
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, nearest

OCR = "rewards.ocr.weight=1"


def problem(*overrides):
    with pytest.raises(ConfigError) as error:
        load(None, [OCR, *overrides])
    return str(error.value)


def test_defaults_need_nothing_but_a_reward():
    config = load(None, [OCR])
    assert config.rewards["ocr"].weight == 1.0
    assert (config.window_range, config.window_size, config.train_micro_batch) == ((0, 9), 9, 8)
    assert config.reward_pool("ocr").replicas == 1


def test_file_and_overrides(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("sampling: {group_size: 12, micro_batch: 4}\nrewards:\n  ocr: {}\ntrain:\n  learning_rate: 1e-3\n")
    window = "sampling.window={size: 2, range: [0, 5]}"
    config = load(path, ["sampling.micro_batch=6", "train.learning_rate=2e-4", window])
    assert (config.sampling.group_size, config.sampling.micro_batch) == (12, 6)
    assert config.train.learning_rate == 2e-4 and load(path).train.learning_rate == 1e-3
    assert config.window_range == (0, 5) and config.window_size == 2
    assert load(path, {"sampling.group_size": 8, "pools.reward.ocr.replicas": 3}).reward_pool("ocr").replicas == 3


def test_a_reward_of_the_file_can_be_dropped(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("rewards: {ocr: {}, aesthetic: {}}\npools: {reward: {ocr: {replicas: 2}}}\n")
    config = load(path, ["rewards.ocr=null"])
    assert list(config.rewards) == ["aesthetic"] and config.pools.reward == {}
    again = load(path, ["rewards.ocr=null", "rewards.ocr.weight=2"])  # in the order given
    assert again.rewards["ocr"].weight == 2


@pytest.mark.parametrize(("text", "value"), [
    ("010", 10), ("0o10", 8), ("1:30", "1:30"), ("190:20:30", "190:20:30"), ("1e-3", 0.001), ("12e03", 12000.0), ("yes", "yes"),
    ("2024-01-01", "2024-01-01"), ("=", "="), ("true", True), ("~", None), ("0x1F", 31), ("'010'", "010")])
def test_scalars_are_those_of_yaml_1_2(text, value):
    read = load(None, [f"rewards.ocr.options={{x: {text}}}"]).rewards["ocr"].options["x"]
    assert read == value and type(read) is type(value)


def test_a_configuration_is_read_in_utf_8_wherever_it_comes_from(tmp_path, monkeypatch):
    text = "\ufeffdata: {negative_prompt: größer}\nrewards: {ocr: {}}\n"
    (tmp_path / "a.yaml").write_bytes(text.encode())
    code = ("import sys; from flowgrpo_ray.config.load import load\n"
            "sys.stdout.buffer.write(load(sys.argv[1]).data.negative_prompt.encode())")
    locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in (f"'{sys.executable}' -c \"$CODE\" a.yaml", f"'{sys.executable}' -c \"$CODE\" - < a.yaml",
                    f"cat a.yaml | '{sys.executable}' -c \"$CODE\" /dev/stdin",
                    f"'{sys.executable}' -c \"$CODE\" <(cat a.yaml)"):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**locale, "CODE": code}, capture_output=True,
                              timeout=60)
        assert (done.returncode, done.stdout.decode()) == (0, "größer"), (command, done.stderr.decode())
    (tmp_path / "a.yaml").write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match="a.yaml is not valid YAML: it must be encoded in UTF-8"):
        load(tmp_path / "a.yaml")


def test_nested_too_deeply(tmp_path):
    (tmp_path / "a.yaml").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ConfigError, match="a.yaml is not valid YAML: it is nested too deeply"):
        load(tmp_path / "a.yaml")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_subnormal=False) | st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])) | st.from_regex(r"[-+.0-9a-fxoeE_:]{1,6}", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_yaml_that_is_written_is_read_back_by_old_and_new_readers(value):
    text = yaml12.dump({"x": value})
    assert yaml12.parse(text) == {"x": value}
    assert yaml.safe_load(text) == {"x": value}


def test_numbers_in_free_form_options_are_numbers(tmp_path):
    """Plain YAML 1.1 reads 1e-3 as a text; nothing would turn it into a number where the schema is open."""
    path = tmp_path / "a.yaml"
    path.write_text("rewards: {ocr: {options: {threshold: 1e-3}}}\n")
    assert load(path).rewards["ocr"].options == {"threshold": 0.001}
    assert load(None, ["rewards.ocr.options={threshold: 1e-3}"]).rewards["ocr"].options == {"threshold": 0.001}


def test_an_empty_section_in_a_file_can_be_overridden(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("rewards:\nsampling:\n")
    assert load(path, [OCR, "sampling.num_steps=5"]).sampling.num_steps == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # keys
        (["samplin.kernel=cps"], "unknown key samplin; did you mean sampling?"),
        (["sampling.group_sice=8"], "unknown key sampling.group_sice; did you mean sampling.group_size?"),
        (["sampling.window.sise=8"], "unknown key sampling.window.sise; did you mean sampling.window.size?"),
        (["train.ema.decai=0.5"], "unknown key train.ema.decai; did you mean train.ema.decay?"),
        (["rewards.ocr.wieght=1"], "unknown key rewards.ocr.wieght; did you mean rewards.ocr.weight?"),
        (["pools.rollout.timeout=1"], "unknown key pools.rollout.timeout; did you mean pools.rollout.timeout_s?"),
        (["pools.reward.ocr.replica=1"], "key pools.reward.ocr.replica; did you mean pools.reward.ocr.replicas?"),
        (["rewards.ocr.environment.pyexecutable=/x"],
         "key rewards.ocr.environment.pyexecutable; did you mean rewards.ocr.environment.py_executable?"),
        (["rewards.ocr.environment.zzz=/x"],
         "key rewards.ocr.environment.zzz; the choices in rewards.ocr.environment are pip, py_executable"),
        (["rewards.ocr.environment.py_executable=python"],
         "rewards: ocr.environment.py_executable 'python' is not an absolute path"),
        (["rewards.ocr.environment.py_executable=''"], "rewards: ocr.environment.py_executable '' is not an absolute path"),
        (["zzz=1"], "unknown key zzz; the choices are advantage, "),
        # names and values
        (["rewards.orc.weight=1"], "rewards: no reward is named 'orc'; did you mean ocr?"),
        (["rewards.ocr.weight=0"], "at least one reward needs a weight other than 0"),
        (["rewards.ocr.weight=nan"], "rewards.ocr.weight: Input should be a finite number"),
        (["rewards.ocr.weight=.inf"], "rewards.ocr.weight: Input should be a finite number"),
        (["rewards.ocr.timeout_s=.inf"], "rewards.ocr.timeout_s: Input should be a finite number"),
        (["rewards.ocr.max_failure_rate=.nan"], "rewards.ocr.max_failure_rate: Input should be a finite number"),
        (["rewards.ocr=null"], "at least one reward needs a weight other than 0"),
        (["rewards.orc=null"], "override rewards.orc=null: there is no reward 'orc' to drop; did you mean ocr?"),
        (["train.seed=9223372036854775808"], "train.seed: Input should be less than or equal to 9223372036854775807"),
        (["sampling.kernel=flow_sd"], "'flow_sde', 'cps' or 'dance_sde' (it is 'flow_sd')"),
        (["sampling.noise_level=0"], "sampling.noise_level: Input should be greater than 0"),
        (["sampling.noise_level=.inf"], "sampling.noise_level: Input should be a finite number"),
        (["sampling.group_size=6.5"], "sampling.group_size: Input should be a valid integer"),
        (["train.betas=[2, 0.9]"], "train.betas.0: Input should be less than 1"),
        (["train.ratio_tolerance=-1"], "train.ratio_tolerance: Input should be greater than or equal to 0 (it is -1)"),
        (["train.ratio_tolerance=atuo"], "train.ratio_tolerance: Input should be 'auto' (it is 'atuo')"),
        (["run.name=a b"], "run.name"),
        (["eval.grid_images=65"], "eval.grid_images: Input should be less than or equal to 64"),
        (["sampling=3"], "sampling: Input should be a valid dictionary"),
        # parts that have to fit
        (["sampling.group_size=1"], "sampling.group_size is 1: an advantage is relative to its group"),
        (["sampling.micro_batch=7"], "sampling.micro_batch is 7, which does not divide sampling.group_size 24; "
                                     "its divisors are 1, 2, 3, 4, 6, 8, 12, 24"),
        (["train.micro_batch=5", "train.ratio_tolerance=0.1"], "train.micro_batch is 5, which does not divide"),
        (["train.micro_batch=4"], "training micro-batches have 4 rows (train.micro_batch 4 x train.batch_groups 1), those of "
                                  "sampling 8: bits depend on batch shape, so set train.ratio_tolerance to a number"),
        (["sampling.batch_groups=2"], "sampling.batch_groups is 2, so a micro-batch holds whole groups: set "
                                      "sampling.micro_batch to sampling.group_size (24), or sampling.batch_groups to 1"),
        (["train.batch_groups=2"], "train.batch_groups is 2, so a micro-batch holds whole groups: set train.micro_batch"),
        (["sampling.micro_batch=24", "sampling.batch_groups=4", "train.batch_groups=2"],
         "training micro-batches have 48 rows (train.micro_batch 24 x train.batch_groups 2), those of sampling 96"),
        (["train.updates_per_step=5"], "train.updates_per_step is 5, which does not divide sampling.groups_per_step "
                                       "48; its divisors are 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
        (["sampling.window.range=[0, 11]"], "[0, 11] leaves the schedule of 10 steps; the widest range is [0, 10]"),
        (["sampling.window.range=[-1, 5]"], "[-1, 5] leaves the schedule"),
        (["sampling.window.range=[5, 5]"], "[5, 5] is empty"),
        (["sampling.kernel=cps", "sampling.window.range=[0, 11]"], "the widest range is [0, 9]"),
        (["sampling.kernel=cps", "sampling.window.range=[5, 10]"], "contains step 9, at which cps adds no noise"),
        (["sampling.window.size=4", "sampling.window.range=[2, 5]"], "holds 3 steps; the largest size is 3"),
        (["sampling.max_staleness=1"], "sampling.max_staleness is 1: sampling ahead of the learner is not built"),
        (["sampling.kernel=cps", "sampling.noise_level=1.2"], "sampling.noise_level is 1.2: cps takes it as an angle"),
        (["loss.ratio_norm=true", "sampling.log_prob=unscaled"], "loss.ratio_norm needs sampling.log_prob: gaussian"),
        (["advantage.combine=gdpo", "advantage.std=global"], "advantage.combine gdpo normalises every reward"),
        (["advantage.combine=gdpo", "advantage.baseline=history"], "advantage.combine gdpo normalises every reward"),
        (["pools.reward.orc.replicas=2"], "pools.reward.orc has no reward: the rewards are ocr; did you mean ocr?"),
        (["pools.placement=colocated", "train.sharding=full"], "train.sharding full cannot sample"),
        (["pools.placement=colocated", "train.sharding=hybrid", "train.shard_size=1"], "train.sharding hybrid cannot"),
        (["pools.placement=colocated", "pools.learner.replicas=2", "pools.learner.collective_timeout_s=120"],
         "collective_timeout_s is 120: colocated ranks may be two sampling calls apart, 2 x pools.rollout.timeout_s = "
         "1200; use at least 1200, leave it out"),
        (["train.sharding=hybrid", "pools.learner.replicas=4"], "train.sharding hybrid needs train.shard_size, a "
                                                                "divisor of pools.learner.replicas (4): 1, 2, 4"),
        (["train.sharding=hybrid", "train.shard_size=3", "pools.learner.replicas=4"], "needs train.shard_size"),
        # overrides
        (["sampling.group_size"], "override 'sampling.group_size' is not of the form section.key=value"),
        (["=3"], "is not of the form section.key=value"),
        (["sampling.window=[0"], "the value is not valid YAML"),
        (["sampling.group_size=8", "sampling.group_size.x=8"], "group_size is a value, not a section"),
    ])
def test_mistakes_are_named(overrides, message):
    assert message in problem(*overrides)


def test_all_mistakes_are_named_at_once():
    text = problem("sampling.micro_batch=7", "sampling.window.range=[0, 12]", "train.updates_per_step=5")
    assert all(key in text for key in ("sampling.micro_batch", "sampling.window.range", "train.updates_per_step"))
    text = problem("samplin.x=1", "train.learning_rate=-1")
    assert "samplin" in text and "train.learning_rate" in text


def test_what_is_allowed_at_the_edges():
    load(None, [OCR, "sampling.window.range=[0, 10]"])  # flow_sde adds noise at the last step too
    load(None, [OCR, "sampling.kernel=cps", "sampling.window.range=[0, 9]", "sampling.noise_level=1"])
    load(None, [OCR, "train.micro_batch=4", "train.ratio_tolerance=1e-5"])
    load(None, ["rewards.ocr.weight=-1", "rewards.jpeg_compressibility.weight=0"])
    load(None, [OCR, "pools.placement=colocated", "train.sharding=none"])
    load(None, [OCR, "train.sharding=hybrid", "train.shard_size=2", "pools.learner.replicas=4"])
    load(None, [OCR, "advantage.combine=gdpo"])


@pytest.mark.parametrize(("overrides", "seconds"), [
    ([], 120.0), (["pools.learner.replicas=2"], 120.0), (["pools.placement=colocated"], 120.0),
    (["pools.placement=colocated", "pools.learner.replicas=2"], 1320.0),
    (["pools.placement=colocated", "pools.learner.replicas=2", "pools.rollout.timeout_s=30"], 180.0),
    (["pools.placement=colocated", "pools.learner.replicas=2", "pools.learner.collective_timeout_s=1200"], 1200.0),
    (["pools.learner.replicas=2", "pools.learner.collective_timeout_s=5"], 5.0)])
def test_a_collective_may_take_as_long_as_ranks_may_be_apart(overrides, seconds):
    assert load(None, [OCR, *overrides]).collective_timeout_s == seconds


def test_files_that_are_no_configuration(tmp_path):
    (tmp_path / "tiny.yaml").write_text("rewards: {ocr: {}}\n")
    with pytest.raises(ConfigError, match="no configuration file at .*tinny.yaml; did you mean .*tiny.yaml"):
        load(tmp_path / "tinny.yaml")
    with pytest.raises(ConfigError, match="no configuration file"):
        load(tmp_path / "nowhere" / "tiny.yaml")
    (tmp_path / "tiny.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="tiny.yaml is not valid YAML"):
        load(tmp_path / "tiny.yaml")
    (tmp_path / "tiny.yaml").write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="holds a list; a configuration is a mapping"):
        load(tmp_path / "tiny.yaml")


def test_errors_are_for_users_and_values():
    assert issubclass(ConfigError, FlowGrpoError) and issubclass(ConfigError, ValueError)


# The hash -------------------------------------------------------------------------------------------------------------

def test_hash_leaves_out_where_and_how_it_runs_and_what_is_measured():
    plain = load(None, [OCR]).result_hash()
    for override in ("run.name=other", "run.steps=7", "pools.rollout.replicas=5", "pools.placement=colocated",
                     "logging.level=debug", "checkpoint.every_steps=3", "pools.reward.ocr.num_gpus=0.5", "eval.seed=1",
                     "eval.every_steps=3", "data.eval_prompts=x.txt", "train.ratio_tolerance=1", "train.sharding=none"):
        assert load(None, [OCR, override]).result_hash() == plain, override
    assert len(plain) == 64


@pytest.mark.parametrize("override", [
    "timeout_s=7", "retries=5", "on_failure=fail", "max_failure_rate=0.1",
    "self_test=false", "environment.py_executable=/other/python",
    "options.url=http://elsewhere:1", "options.timeout_s=2", "options.backoff_s=2", "options.retries=9"])
def test_hash_leaves_out_how_a_reward_is_waited_for_and_where_its_server_is(override):
    remote = ["rewards.far.type=remote", "rewards.far.options.url=http://here:1"]
    assert load(None, [*remote, f"rewards.far.{override}"]).result_hash() == load(None, remote).result_hash()


def test_hash_leaves_out_monitors_and_the_order_of_rewards():
    a, b, monitor = "rewards.a.type=ocr", "rewards.b.type=jpeg_compressibility", "rewards.m={type: ocr, weight: 0}"
    assert load(None, [b, monitor, a]).result_hash() == load(None, [a, b]).result_hash()


def test_hash_feels_options_of_the_same_name_that_another_reward_scores_by():
    own = ["rewards.own.python=own_rewards:nowhere", "rewards.own.options.url=a"]
    assert load(None, [*own[:1], "rewards.own.options.url=b"]).result_hash() != load(None, own).result_hash()


@pytest.mark.parametrize(
    "override",
    ["rewards.ocr.type=video_ocr", "train.seed=1",
     "sampling.noise_level=0.8", "model.dtype=bfloat16", "model.cpu_threads=2", "lora.rank=4",
     "data.negative_prompt=x", "rewards.ocr.weight=2", "rewards.ocr.options={a: 1}",
     "rewards.jpeg_compressibility.weight=0.5",
     "advantage.std=none", "loss.beta=0.1", "train.ema.decay=0.5", "sampling.window.size=2"])
def test_hash_feels_whatever_can_change_the_result(override):
    assert load(None, [OCR, override]).result_hash() != load(None, [OCR]).result_hash()


def test_hash_is_of_the_values_not_of_how_they_were_written(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {seed: 42, learning_rate: 0.0003}\nrewards: {ocr: {weight: 1}}\n")
    assert load(tmp_path / "a.yaml").result_hash() == load(None, [OCR]).result_hash()


# Back to YAML ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("documented", [False, True])
def test_yaml_round_trip(documented):
    config = load(None, [OCR, "sampling.window={size: 2, range: [0, 5]}", "pools.reward.ocr.env={A: 'b: c'}",
                         "data.negative_prompt='#x'", "rewards.ocr.options={a: [1, {b: null}]}",
                         "lora.targets=[to_q, to_k]"])
    assert from_tree(yaml.safe_load(to_yaml(config, documented=documented))) == config


def test_every_field_is_documented():
    def check(model, path):
        for name, field in model.model_fields.items():
            assert field.description, f"{path}{name}"
            if hasattr(field.annotation, "model_fields"):
                check(field.annotation, f"{path}{name}.")

    check(Config, "")
    text = to_yaml(load(None, [OCR]), documented=True)
    assert "# a, the noise level of the kernel\n  noise_level: 0.7" in text


def test_assignment_is_checked():
    config = load(None, [OCR])
    with pytest.raises(ValueError, match="noise_level"):
        config.sampling.noise_level = -1


# Helpers --------------------------------------------------------------------------------------------------------------

def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1]


def test_nearest():
    assert nearest("groupsize", ["group_size", "seed"]) == "; did you mean group_size?"
    assert nearest("groupsize", ["group_size"], "sampling") == "; did you mean sampling.group_size?"
    assert nearest("zz", ["b", "a"]) == "; the choices are b, a"
    assert nearest("zz", ["b", "a"], "run") == "; the choices in run are b, a"
    assert nearest("zz", []) == ""


@pytest.mark.parametrize("text", ["run.steps=true", "loss.beta=false", "train.betas=true", "eval=true"])
def test_a_truth_value_is_no_number(text):
    with pytest.raises(ConfigError, match=f"{text.split('=')[0]}: is {text.split('=')[1]}, which is no number"):
        load(None, ["rewards={ocr: {}}", text])
    assert load(None, ["rewards={ocr: {}}", "logging.live=false"]).logging.live is False


def test_files_that_cannot_be_read_as_one(tmp_path):
    (tmp_path / "twice.yaml").write_text("run: {steps: 3}\nrewards: {ocr: {}}\nrun: {steps: 5}\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.yaml").mkdir()
    for name, message in (("twice", r"duplicate key 'run' \(line 3, column 1\)"), ("bytes", "not valid YAML"),
                          ("d", "is a folder")):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / f"{name}.yaml")


def test_further_contradictions():
    assert "range [3, 3] is empty" in problem("sampling.window.range=[3, 3]")
    assert "there are no EMA weights" in problem("eval.weights=ema", "train.ema.enabled=false")
    assert "not of the form module:function" in problem("rewards.mine.python=my_rewards")


def test_the_nearest_path_is_judged_by_its_name():
    assert nearest("/tmp/nope", ["/tmp/ocrw", "/tmp/fonts"]) == ""
    assert nearest("/tmp/adaptr", ["/tmp/ocrw", "/tmp/adapter"]) == "; did you mean /tmp/adapter?"
