"""An S3 server in this process, for tests of durable state: `pytest_plugins = ["s3_server"]`."""

from __future__ import annotations

import logging
import uuid

import boto3
import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="module")
def s3_endpoint():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    patch = pytest.MonkeyPatch()
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(key, "testing")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="bucket")
    yield f"{host}:{port}"
    server.stop()
    patch.undo()


@pytest.fixture
def s3_run_dir(s3_endpoint):
    """URI of a run directory that does not exist yet."""
    return f"s3://bucket/runs/{uuid.uuid4().hex}?endpoint_override={s3_endpoint}&scheme=http&region=us-east-1"


@pytest.fixture(params=["local", "s3"])
def run_dir(request, tmp_path):
    """A run directory on either kind of store."""
    return str(tmp_path / "a run") if request.param == "local" else request.getfixturevalue("s3_run_dir")
