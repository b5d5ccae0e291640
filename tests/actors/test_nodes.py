"""What ended an actor, in words: its node and the state of that. And Ray's own messages as records of the log."""

from __future__ import annotations

import socket
import time

import pytest
import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError

from actors import nodes, ray_messages
from actors.process import Process
from flowgrpo_ray.views.status import PoolStatus

ERROR = ActorUnavailableError("RpcError: RPC Error message: failed to connect; code 14", b"0" * 16)


@pytest.fixture
def cluster(monkeypatch):
    """Three nodes as Ray lists them: one that answers, one that does not, and a dead one."""
    server = socket.create_server(("127.0.0.1", 0))
    gone = socket.create_server(("127.0.0.1", 0))
    gone_port = gone.getsockname()[1]
    gone.close()
    listed = [{"NodeID": "a", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1], "Alive": True},
              {"NodeID": "b", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": gone_port, "Alive": True},
              {"NodeID": "c", "NodeManagerAddress": "10.0.0.3", "NodeManagerPort": 1, "Alive": False, "DeathReason": 2},
              {"NodeID": "d", "NodeManagerAddress": "10.0.0.4", "NodeManagerPort": 1, "Alive": False, "DeathReason": 3}]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    monkeypatch.setattr(nodes, "_end_time", lambda node_id: time.mktime((2026, 12, 2, 12, 3, 45, 0, 0, -1)))
    nodes.begin()
    yield
    server.close()


@pytest.mark.parametrize(("node", "node_id", "text"), [
    ("127.0.0.1", "b", "node 127.0.0.1 has not answered since 12:03:45"),
    ("10.0.0.3", "c", "node 10.0.0.3 has been dead since 12:03:45"),
    ("10.0.0.4", "d", "node 10.0.0.4 was preempted at 12:03:45")])
def test_state_of_a_lost_node_replaces_the_text_of_rays_call(cluster, node, node_id, text):
    assert nodes.why_lost(ERROR, node, node_id) == text


def test_actor_lost_on_a_living_node(cluster):
    assert "crashed or was killed" in nodes.why_lost(ERROR, "127.0.0.1", "a")
    died = ray.exceptions.RayActorError(error_msg="Worker exit type: NODE_OUT_OF_MEMORY")
    assert nodes.why_lost(died, "127.0.0.1", "a") == (
        "Ray ended its process because node 127.0.0.1 was running out of memory")


def test_lost_object_names_the_nodes_of_the_run_that_are_gone(cluster):
    for process in (Process(1, "127.0.0.1", "a"), Process(2, "10.0.0.3", "c")):
        nodes.used(process)
    assert nodes.why_lost(ObjectLostError("ab", b"", "")) == (
        "data of this step were lost: node 10.0.0.3 has been dead since 12:03:45")


def test_actors_by_node():
    pools = {"rollout": PoolStatus(3, nodes={"10.0.0.3": 1, "10.0.0.2": 2}), "learner": PoolStatus(1, nodes={})}
    assert nodes.placed(pools) == "nodes: rollout 10.0.0.2 x2, 10.0.0.3 x1"


def test_rays_messages_are_one_line_each_without_the_log_of_a_raylet(capsys, monkeypatch):
    worker, told = ray._private.worker, []
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    monkeypatch.setattr(ray_messages, "_said", set())
    monkeypatch.setattr(ray_messages.log, "warning", lambda form, *args: told.append(form % args))
    ray_messages.join_ours()
    dump = ("Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL. Last 20 lines of the "
            "Raylet logs:\n    [state-dump] NodeManager:\n" + "    [state-dump] x\n" * 19)
    killed = ("A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
              "check the logs for the dead worker. Lease ID: 15 Worker exit detail: Some common causes include: (1) the OOM")
    for _ in range(2):  # both agents of the node report it
        worker.print_to_stdstream({"lines": [dump, killed], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert told == ["Raylet is terminated. Termination is unexpected.",
                    "A worker died or was killed while executing a task by an unexpected system error."]
    assert capsys.readouterr().out == ""
