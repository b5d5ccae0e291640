"""Exceptions of actors: what the error that ends a run says of them, and where the traceback goes."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors import tracebacks
from flowgrpo_ray.errors import ConfigError, FlowGrpoError

HEADER = "\x1b[36mray::LearnerActor.apply()\x1b[39m (pid=7, ip=10.0.0.2, actor_id=ab, repr=first/learner-0)"
FRAMES = '''
  File "/code/mine.py", line 12, in apply
    return step()
           ^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/optim.py", line 80, in step
    raise
'''


def failed(cause: Exception) -> RayTaskError:
    text = f"{HEADER}{FRAMES}{type(cause).__name__}: {cause}"
    return RayTaskError("apply", text, cause, proctitle="ray::apply", pid=7, ip="10.0.0.2").as_instanceof_cause()


def ended(error: BaseException, keep=lambda text: None) -> FlowGrpoError:
    """The error that a run ends with, because of this one."""
    with pytest.raises(FlowGrpoError) as caught, tracebacks.kept(keep):
        raise FlowGrpoError(f"apply on learner rank 0 failed: {tracebacks.summary(error)}") from error
    return caught.value


@pytest.mark.parametrize("error", [
    failed(ValueError("no such word\nin the list")),
    RayActorError(error_msg=f"The actor died because of an error raised in its creation task, {HEADER}{FRAMES}"
                            "ValueError: no such word\nin the list", actor_init_failed=True)])
def test_an_exception_is_a_line_with_the_last_place_outside_libraries(error):
    assert tracebacks.summary(error) == "ValueError: no such word (/code/mine.py, line 12)"


def test_the_cause_of_a_call_that_failed_leads_to_its_place():
    cause = ValueError("no such word")
    assert tracebacks.summary(cause) == "ValueError: no such word"
    cause.__cause__ = failed(cause)
    assert tracebacks.summary(cause) == "ValueError: no such word (/code/mine.py, line 12)"


def test_the_traceback_is_kept_and_its_place_told(caplog):
    texts = []
    error = ended(failed(ValueError("no such word")), lambda text: texts.append(text) or "/runs/first/traceback.txt")
    assert str(error) == ("apply on learner rank 0 failed: ValueError: no such word (/code/mine.py, line 12). "
                          "Its traceback is in /runs/first/traceback.txt")
    assert "repr=first/learner-0" in texts[0] and "line 80, in step" in texts[0] and "\x1b" not in texts[0]
    assert caplog.text == ""


def full(text: str) -> str:
    raise OSError("no space left on device")


@pytest.mark.parametrize("keep", [full, lambda text: None])
def test_a_traceback_that_has_no_place_goes_to_the_log(keep, caplog):
    assert str(ended(failed(ValueError("no such word")), keep)).endswith("line 12)")
    assert "line 80, in step" in caplog.text and "\x1b" not in caplog.text


@pytest.mark.parametrize("cause", [ConfigError("lora.rank must be at least 1"), OSError("no space left on device")])
def test_an_error_that_explains_itself_needs_no_traceback(cause, caplog):
    def unwanted(text: str) -> str:
        raise AssertionError(text)

    with pytest.raises(FlowGrpoError, match=f"apply on learner rank 0: {cause}$"), tracebacks.kept(unwanted):
        raise FlowGrpoError(f"apply on learner rank 0: {cause}") from failed(cause)
    assert caplog.text == ""
