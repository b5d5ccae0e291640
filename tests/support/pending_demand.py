"""What Ray tells an autoscaler about a cluster."""

from __future__ import annotations

from clusters import Nodes

Demand = list[tuple[dict[str, float], dict[str, list[str]], int]]


def _state(nodes: Nodes):  # noqa: ANN202
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply

    reply = GcsClient(address=nodes.address).get_cluster_resource_state()
    return GetClusterResourceStateReply.FromString(reply).cluster_resource_state


def pending(nodes: Nodes) -> Demand:
    """Resources, wanted labels and number of the actors that wait for a node."""
    return [(dict(each.request.resources_bundle),
             {wanted.label_key: list(wanted.label_values)
              for selector in each.request.label_selectors for wanted in selector.label_constraints}, each.count)
            for each in _state(nodes).pending_resource_requests]


def idle(nodes: Nodes) -> set[str]:
    """Addresses of the nodes that an autoscaler may take away."""
    from ray.core.generated.autoscaler_pb2 import NodeStatus

    return {node.node_ip_address for node in _state(nodes).node_states if node.status == NodeStatus.IDLE}
