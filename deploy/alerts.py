"""The table of alerts. Each has a heading in docs/operations.md, which says what it means and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_RUN = "by (run, run_id)"
_POOL = "by (run, run_id, pool)"


@dataclass(frozen=True)
class Alert:
    """`expr` must hold for the time `lasts` (PromQL's `for`); `summary` and `description` are templates."""

    name: str
    expr: str
    lasts: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        return f"docs/operations.md#{self.name.lower()}"


ALERTS = (
    Alert("FlowGrpoNoStep",
          # the longest series of a resumed run counts; a driver that still starts has deadlines of its own
          f"time() - max {_RUN} (ray_flowgrpo_last_step_timestamp) > clamp_min(5 * max {_RUN} "
          f"(quantile_over_time(0.5, ray_flowgrpo_time_step[1d])), 60) "
          f'unless max {_RUN} (ray_flowgrpo_phase{{phase="starting"}}) == 1',
          "1m", "critical", "{{ $labels.run }} commits no steps",
          "The last step was committed {{ $value | humanizeDuration }} ago, more than five times the median step."),
    Alert("FlowGrpoSyncFailed", f"sum {_RUN} (increase(ray_flowgrpo_sync_failures_total[15m])) > 0", "0m", "critical",
          "{{ $labels.run }}: a weight sync was not proven",
          "An actor did not hold the weights that the learner exported. The run has ended."),
    Alert("FlowGrpoImagesWithoutScore",
          f"sum {_RUN} (increase(ray_flowgrpo_images_without_score_total[1h])) / "
          f"sum {_RUN} (increase(ray_flowgrpo_images_made_total[1h])) > 0.05",
          "1m", "warning", "{{ $labels.run }}: rewards fail",
          "{{ $value | humanizePercentage }} of the images of the last hour have no score."),
    Alert("FlowGrpoActorDeaths",
          # increase() extrapolates: three deaths read as a little more than 3
          f"sum {_POOL} (increase(ray_flowgrpo_actors_replaced_total[10m])) > 3.5", "0m", "warning",
          "{{ $labels.run }}: actors of pool {{ $labels.pool }} die",
          "More than 3 actors were replaced within 10 minutes."),
    Alert("FlowGrpoRebuild", f'max {_RUN} (ray_flowgrpo_phase{{phase="rebuilding"}}) == 1', "10m", "critical",
          "{{ $labels.run }} has no learner", "The learner group is being built again for more than 10 minutes."),
    Alert("FlowGrpoPoolShort", f"max {_POOL} (ray_flowgrpo_pool_target) - max {_POOL} (ray_flowgrpo_pool_ready) > 0", "15m",
          "warning", "{{ $labels.run }}: pool {{ $labels.pool }} is short of actors",
          "{{ $value }} actors are missing for more than 15 minutes."),
    Alert("FlowGrpoSpilling",
          'sum by (ray_io_cluster, SessionName, NodeAddress) (ray_object_store_memory{Location="SPILLED"}) > 0', "1m",
          "warning", "Ray spills objects on {{ $labels.NodeAddress }}",
          "{{ $value | humanize1024 }}B of objects are on disk because the object store is full."),
    Alert("FlowGrpoCheckpointOld",
          f"max {_RUN} (ray_flowgrpo_step) - max {_RUN} (ray_flowgrpo_checkpoint_step) > "
          f"3 * (max {_RUN} (ray_flowgrpo_checkpoint_interval) > 0)",
          "1m", "critical", "{{ $labels.run }}: no new checkpoint",
          "{{ $value }} steps would be lost, more than 3 times checkpoint.every_steps."),
    Alert("FlowGrpoLearnerIdle",
          f'1 - max {_RUN} (avg_over_time(ray_flowgrpo_busy_share{{role="learner"}}[30m])) > 0.5 '
          f'unless max {_RUN} (ray_flowgrpo_pool_target{{pool="colocated"}})',
          "30m", "info", "{{ $labels.run }}: the learner waits",
          "It was idle for {{ $value | humanizePercentage }} of the last half hour."),
    Alert("FlowGrpoZeroSpread", f"max {_RUN} (avg_over_time(ray_flowgrpo_zero_std_group_fraction[30m])) > 0.8", "15m",
          "warning", "{{ $labels.run }}: groups without spread",
          "In {{ $value | humanizePercentage }} of the groups all images have one score: nothing is learned from them."),
    Alert("FlowGrpoLogRatio",
          f"max {_RUN} (ray_flowgrpo_first_update_log_ratio_max) > 0.5 * max {_RUN} (ray_flowgrpo_ratio_tolerance)", "0m",
          "warning", "{{ $labels.run }}: sampler and learner drift apart",
          "The first update's largest |log ratio| is {{ $value }}, more than half of what is tolerated."),
    Alert("FlowGrpoDiskFull", "max by (ray_io_cluster, SessionName, ip) (ray_node_disk_utilization_percentage) > 85", "5m",
          "critical", "The disk of {{ $labels.ip }} is nearly full",
          "{{ $value | humanize }} % is used; above 95 % Ray stores no more objects on the node."),
)
