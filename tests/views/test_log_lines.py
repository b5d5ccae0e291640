"""Lines of a log: time, step and text, whoever writes them."""

from __future__ import annotations

import io
import logging
import re

import pytest

from flowgrpo_ray.views import log_lines

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def a_log():
    log_lines.begin()
    yield
    log_lines.end()


def test_every_line_carries_time_and_step():
    assert re.fullmatch(rf"{TIME}  hello", log_lines.marked("hello"))
    log_lines.at_step(3, 30)
    assert re.fullmatch(rf"{TIME}  step  3/30  a\n{TIME}  step  3/30  b", log_lines.marked("a\nb"))
    assert re.fullmatch(rf"{TIME}  step 4/30  of a row", log_lines.marked("step 4/30  of a row", step=False))


def test_log_records_name_foreign_libraries_alone():
    out = io.StringIO()
    handler = log_lines.handler(out)
    for name in ("actors.pool", "ray.cluster"):
        handler.handle(logging.makeLogRecord({"name": name, "levelname": "WARNING", "msg": "x %s", "args": ("y",)}))
    own, foreign = out.getvalue().splitlines()
    assert re.fullmatch(rf"{TIME}  WARNING x y", own) and re.fullmatch(rf"{TIME}  WARNING ray.cluster: x y", foreign)


def test_text_stays_as_it_is_where_no_log_is_written():
    log_lines.end()
    assert log_lines.marked("a\nb") == "a\nb"
