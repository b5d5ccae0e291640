import hashlib
import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowgrpo_ray import storage
from flowgrpo_ray.errors import CheckpointError, ConfigError
from flowgrpo_ray.run_dir import checkpoint

pytestmark = pytest.mark.usefixtures("ieee_floats")

pytest_plugins = ["s3_server"]

FILES = {"adapter.safetensors": b"adapter" * 100, "ema/adapter.safetensors": b"ema" * 100, "empty": b""}
STATE = {"updates": 7, "world_size": 2, "loss": 0.1, "none": None, "nested": {"list": [1, 2.5, "x"], "flag": True}}


def make(run_dir, step, run_id="run-a", result_hash="h" * 64, files=FILES, state=STATE):
    uri = checkpoint.step_dir(run_dir, step)
    entries = checkpoint.write_files(uri, files)
    return checkpoint.commit(uri, entries, state, run_id=run_id, step=step, result_hash=result_hash)


def test_round_trip(run_dir):
    assert checkpoint.latest(run_dir) is None
    made = make(run_dir, 3)
    make(run_dir, 12)
    found = checkpoint.latest(run_dir)
    assert (found.step, found.run_id, found.result_hash, found.state) == (12, "run-a", "h" * 64, STATE)
    assert checkpoint.open_checkpoint(checkpoint.step_dir(run_dir, 3)) == made
    assert {entry.name: checkpoint.read_file(found, entry.name) for entry in found.files} == FILES
    assert found.run_dir == run_dir


def test_several_writers_share_a_folder(run_dir):
    uri = checkpoint.step_dir(run_dir, 1)
    entries = checkpoint.write_files(uri, {"a": b"1"}) + checkpoint.write_files(uri, {"b": b"22"})
    checkpoint.commit(uri, entries, {}, run_id="r", step=1, result_hash="h")
    assert [e.name for e in checkpoint.open_checkpoint(uri).files] == ["a", "b"]
    with pytest.raises(CheckpointError, match="a is listed twice"):
        checkpoint.commit(uri, [*entries, entries[0]], {}, run_id="r", step=1, result_hash="h")


def overwrite(info, name, change):
    uri = storage.join(info.uri, name)
    storage.write_bytes(uri, change(storage.read_bytes(uri)))


DAMAGE = {
    "truncated file": (lambda i: overwrite(i, "adapter.safetensors", lambda b: b[:-1]),
                       "adapter.safetensors is truncated: 699 bytes where 700 were written"),
    "longer file": (lambda i: overwrite(i, "empty", lambda b: b"x"), "empty is too long: 1 bytes where 0"),
    "flipped byte": (lambda i: overwrite(i, "ema/adapter.safetensors", lambda b: bytes([b[0] ^ 1]) + b[1:]),
                     "ema/adapter.safetensors is not what was written: its sha256 is"),
    "missing file": (lambda i: storage.delete_file(storage.join(i.uri, "ema/adapter.safetensors")),
                     "ema/adapter.safetensors is missing"),
    "missing token": (lambda i: storage.delete_file(storage.join(i.uri, "state.json")), "state.json is missing"),
    "truncated token": (lambda i: overwrite(i, "state.json", lambda b: b[:-20]), "state.json is damaged"),
    "changed token": (lambda i: overwrite(i, "state.json", lambda b: b.replace(b'"updates": 7', b'"updates": 8')),
                      "state.json is damaged: its content does not match"),
    "token is no object": (lambda i: overwrite(i, "state.json", lambda b: b"[]"), "state.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_skipped(run_dir, damage, caplog):
    make(run_dir, 5)
    info = make(run_dir, 10)
    do, message = DAMAGE[damage]
    do(info)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open_checkpoint(info.uri)
    assert message in str(caught.value) and "step_10" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(run_dir).step == 5
    assert message in caplog.text and "step_10" in caplog.text


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_changed_byte_is_found(tmp_path_factory, data):
    info = make(str(tmp_path_factory.mktemp("flip")), 1)
    name = data.draw(st.sampled_from(["adapter.safetensors", "ema/adapter.safetensors", "state.json"]))
    uri = storage.join(info.uri, name)
    raw = bytearray(storage.read_bytes(uri))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    storage.write_bytes(uri, bytes(raw))
    try:
        found = checkpoint.open_checkpoint(info.uri)
    except CheckpointError as error:
        assert name in str(error)
    else:  # white space between two JSON tokens means nothing
        assert name == "state.json" and found == info


def test_read_file_verifies(run_dir):
    info = make(run_dir, 1)
    overwrite(info, "adapter.safetensors", lambda b: b[:-1] + b"!")
    with pytest.raises(CheckpointError, match="adapter.safetensors is not what was written"):
        checkpoint.read_file(info, "adapter.safetensors")
    with pytest.raises(CheckpointError, match="no file 'adaptor.safetensors'; did you mean adapter.safetensors"):
        checkpoint.read_file(info, "adaptor.safetensors")


def test_commit_refuses_what_is_not_there(run_dir):
    uri = checkpoint.step_dir(run_dir, 1)
    entries = checkpoint.write_files(uri, FILES)
    storage.delete_file(storage.join(uri, "empty"))
    with pytest.raises(CheckpointError, match="empty is missing"):
        checkpoint.commit(uri, entries, {}, run_id="r", step=1, result_hash="h")
    assert checkpoint.latest(run_dir) is None


def test_a_step_that_is_written_again_is_no_checkpoint_until_committed(run_dir):
    make(run_dir, 4)
    checkpoint.write_files(checkpoint.step_dir(run_dir, 4), {"adapter.safetensors": b"adapter" * 100})
    assert checkpoint.latest(run_dir) is None


def test_a_renamed_folder_and_a_newer_format_are_refused(tmp_path):
    run_dir = str(tmp_path)
    make(run_dir, 4)
    (tmp_path / "checkpoints/step_4").rename(tmp_path / "checkpoints/step_9")
    with pytest.raises(CheckpointError, match="state.json is of step 4"):
        checkpoint.open_checkpoint(checkpoint.step_dir(run_dir, 9))
    (tmp_path / "checkpoints/step_9").rename(tmp_path / "mine")
    assert checkpoint.open_checkpoint(str(tmp_path / "mine")).step == 4
    token = json.loads((tmp_path / "mine/state.json").read_text()) | {"format": 99}
    del token["sha256"]
    text = json.dumps(token, sort_keys=True, separators=(",", ":"))
    token["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "mine/state.json").write_text(json.dumps(token))
    with pytest.raises(CheckpointError, match="format 99, this version reads format 1"):
        checkpoint.open_checkpoint(str(tmp_path / "mine"))


def test_foreign_run(tmp_path, caplog):
    run_dir = str(tmp_path)
    make(run_dir, 1)
    info = make(run_dir, 2, run_id="run-b")
    with pytest.raises(CheckpointError, match="is of run 'run-b', not of run 'run-a'"):
        checkpoint.check_run(info, "run-a")
    assert checkpoint.latest(run_dir, run_id="run-a").step == 1
    assert "step_2 is of run 'run-b'" in caplog.text


def test_prune(run_dir):
    for step in (2, 4, 6, 8):
        make(run_dir, step)
    overwrite(checkpoint.open_checkpoint(checkpoint.step_dir(run_dir, 6)), "state.json", lambda b: b"{}")
    checkpoint.write_files(checkpoint.step_dir(run_dir, 10), FILES)  # being written
    assert checkpoint.prune(run_dir, 3) == []
    assert checkpoint.prune(run_dir, 2) == [2]
    names = storage.list_dir(storage.join(run_dir, "checkpoints"))
    assert names == ["step_10", "step_4", "step_6", "step_8"]  # 6 is none and lies above 4, the oldest one kept
    assert checkpoint.latest(run_dir).step == 8
    with pytest.raises(CheckpointError, match="use 1"):
        checkpoint.prune(run_dir, 0)


def test_prune_takes_the_token_first(run_dir, monkeypatch):
    for step in (1, 2):
        make(run_dir, step)

    def crash(uri):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "delete_dir", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune(run_dir, 1)
    monkeypatch.undo()
    assert storage.list_dir(checkpoint.step_dir(run_dir, 1)) == ["adapter.safetensors", "ema", "empty"]
    assert checkpoint.prune(run_dir, 1) == [1]


@pytest.mark.parametrize("name", ["state.json", "../x", "/x", "a//b", "", "."])
def test_bad_file_names(tmp_path, name):
    with pytest.raises(CheckpointError, match="not a name"):
        checkpoint.write_files(str(tmp_path), {name: b""})


@pytest.mark.parametrize("state, path", [
    ({"a": {"b": [1, float("nan")]}}, r"state\.a\.b\[1\] is nan"),
    ({"a": np.float32(1)}, r"state\.a is .*a float32"),
    ({1: 2}, "state has the key 1"),
])
def test_state_that_json_would_change_is_refused(tmp_path, state, path):
    with pytest.raises(CheckpointError, match=path):
        make(str(tmp_path), 1, state=state)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children), max_leaves=10)


@given(state=st.dictionaries(st.text(), json_values))
@settings(max_examples=50, deadline=None)
def test_any_state_comes_back(tmp_path_factory, state):
    run_dir = str(tmp_path_factory.mktemp("state"))
    make(run_dir, 1, files={}, state=state)
    assert checkpoint.latest(run_dir).state == state


@given(arrays=st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda s: s != "__metadata__" and s.isprintable()),
    hnp.arrays(st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint16, np.uint8, np.bool_]),
               hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)), max_size=4),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
@settings(deadline=None)
def test_tensors_round_trip(arrays, metadata):
    found, meta = checkpoint.bytes_to_tensors(checkpoint.tensors_to_bytes(arrays, metadata))
    assert meta == metadata and set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes() and found[name].flags.writeable


def test_tensors_of_any_memory_order():
    array = np.arange(12.0).reshape(3, 4).T
    found, _ = checkpoint.bytes_to_tensors(checkpoint.tensors_to_bytes({"x": array}))
    np.testing.assert_array_equal(found["x"], array)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        checkpoint.bytes_to_tensors(b"garbage")


def test_uris():
    uri = "s3://key:secret@bucket/runs?region=x"
    assert storage.join(uri, "a b", "c") == "s3://key:secret@bucket/runs/a%20b/c?region=x"
    assert storage.parent(storage.join(uri, "a", "b"), 2) == uri
    assert storage.display(uri) == "s3://***@bucket/runs" and "secret" not in storage.redact(f"dir: {uri}")
    with pytest.raises(ConfigError, match="no store is named 's4'; the choices are file, s3, gs"):
        storage.resolve("s4://bucket/x")
    with pytest.raises(ConfigError, match="names no bucket"):
        storage.resolve("s3:///x")
    with pytest.raises(ConfigError, match="Unexpected query parameter"):
        storage.resolve("s3://bucket/x?foo=1")
