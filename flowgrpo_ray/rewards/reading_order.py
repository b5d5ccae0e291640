"""The order in which a person reads boxes of text: lines from top to bottom, each from left to right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OVERLAP = 0.5  # of the smaller letters' height: boxes that share less are on different lines
LONG = 1.5  # a box so many times as long as it is high shows which way its line runs


def reading_order(boxes: Sequence[np.ndarray]) -> list[int]:
    """Indices of text boxes in reading order.

    Boxes are turned by the angle at which the text runs. Two of them are on one line if their heights overlap by
    half of the smaller one and neither stands above the other.

    Args:
        boxes: quadrilaterals [4, 2] in pixels, x to the right and y down; corners from the upper left on, clockwise.
    """
    if len(boxes) < 2:
        return list(range(len(boxes)))
    quads = np.asarray(boxes, np.float64)
    along = (quads[:, 1] + quads[:, 2] - quads[:, 0] - quads[:, 3]) / 2  # from the left side to the right one
    down = (quads[:, 3] + quads[:, 2] - quads[:, 0] - quads[:, 1]) / 2
    lengths, heights = np.hypot(*along.T), np.maximum(np.hypot(*down.T), 1.0)
    angle = _angle(along, lengths, heights)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    x, y = turn @ quads.mean(axis=1).T
    turned = quads @ turn.T
    left, right = turned[..., 0].min(axis=1), turned[..., 0].max(axis=1)

    def stacked(i: int, j: int) -> bool:
        shared = min(right[i], right[j]) - max(left[i], left[j])
        return shared > OVERLAP * min(right[i] - left[i], right[j] - left[j])

    def share(i: int, line: list[int]) -> float:
        """Of the smaller letters' height, what a box shares with its nearest neighbour on a line."""
        if any(stacked(i, j) for j in line):
            return 0.0
        j = min(line, key=lambda j: abs(x[j] - x[i]))
        shared = min(y[k] + heights[k] / 2 for k in (i, j)) - max(y[k] - heights[k] / 2 for k in (i, j))
        return shared / min(heights[i], heights[j])

    lines: list[list[int]] = []
    for i in sorted(range(len(quads)), key=lambda i: (y[i], x[i])):
        line = max(lines, key=lambda line: share(i, line), default=None)
        if line is not None and share(i, line) >= OVERLAP:
            line.append(i)
        else:
            lines.append([i])
    lines.sort(key=lambda line: y[line].mean())
    return [i for line in lines for i in sorted(line, key=lambda i: x[i])]


def _angle(along: np.ndarray, lengths: np.ndarray, heights: np.ndarray) -> float:
    """The angle of the text in radians: that of the boxes that are long enough to show it, the median by length."""
    clear = lengths > LONG * heights
    if not clear.any():
        return 0.0
    angles, weights = np.arctan2(along[clear, 1], along[clear, 0]), lengths[clear]
    order = np.argsort(angles)
    middle = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(angles[order][middle])
