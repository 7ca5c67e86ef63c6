"""Corrections that the literature names, as settings of `kvrl.objectives.corrections`.

Ratios are old policy in the learner's view over sampler. The names are used loosely, so each constant says
whose form it is and where other accounts differ. One difference is common to all: here a masked token or a
rejected sequence has weight 0 and stays in the loss's denominators, as in TRL; verl and early versions of
slime take it out of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["token", "sequence_sum", "sequence_mean"]
Action = Literal["truncate", "mask", "reject"]
Bounds = tuple[float | None, float | None]
PresetName = Literal["tis", "mis", "icepop", "geometric", "sequence_mask"]


class Preset(NamedTuple):
    """The four fields of a correction."""

    level: Level
    action: Action
    bounds: Bounds
    normalize: bool = False


TIS = Preset("token", "truncate", (None, 2.0))
"""Truncated importance sampling: min(ratio, C) per token (Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training").

C = 2 is verl's preset and slime's default; TRL's `token_truncate` defaults to 3. TRL and slime can clamp from
below too (a first bound here), the blog and verl do not.
"""

MIS = Preset("token", "mask", (0.5, 2.0))
"""Masked importance sampling: the token's ratio inside the bounds, 0 outside.

MIS names a family in which masking takes the place of truncation: TRL's `token_mask` and slime's
`tis_mode: mask`, from which the level and the bounds are (slime's defaults, TRL's example). Liu et al. 2025
("When Speed Kills Stability") and arXiv 2510.26788 mean the sequence-level form by MIS: see SEQUENCE_MASK.
"""

ICEPOP = Preset("token", "mask", (0.5, 5.0))
"""IcePop: M(k) = k for alpha <= k <= beta, else 0, on the token's ratio k (arXiv 2510.18855; alpha 0.5, beta 5).

MIS with wider bounds. Bounds differ elsewhere: [1/beta, beta] in open-instruct, which reads the paper so,
[0.5, 2] in a NeMo-RL fork. INTELLECT-3 (arXiv 2512.16144, eq. 1) and rLLM put the current learner into the
ratio where the paper, slime and this preset have the old one.
"""

GEOMETRIC = Preset("sequence_mean", "reject", (0.999, 1.001))
"""Geometric rejection: drop a sequence whose geometric mean of token ratios leaves the bounds; weight 1
otherwise (Liu et al. 2025, "When Speed Kills Stability", part 3: Geo-RS, later Geo-Mask).

The bounds are those of verl's `decoupled_geo_rs` (`seq_mean_k1`); slime suggests [0.9999, 1.0001]. Both are
meant for the numerical noise between two engines. Evicted entries shift the mean by far more (15 nats over
512 tokens are 0.03 per token), so under a tight cache widen the bounds or everything is rejected. verl
offers the same filter with token weights truncated at 2 on top, which one correction cannot express.
"""

SEQUENCE_MASK = Preset("sequence_sum", "mask", (None, 3.0))
"""Sequence-level masked importance sampling: the product of the token ratios up to C, 0 above, for every
token of the sequence (Liu et al. 2025, part 3: Seq-MIS; arXiv 2510.26788, section 4).

C = 3 without a lower bound is TRL's default (`sequence_mask`). The scripts of arXiv 2510.26788 use 3 with plain
policy gradient and 10 with GRPO; verl's `decoupled_seq_is_rs` keeps [0.5, 2.0].
"""

PRESETS: dict[PresetName, Preset] = {
    "tis": TIS,
    "mis": MIS,
    "icepop": ICEPOP,
    "geometric": GEOMETRIC,
    "sequence_mask": SEQUENCE_MASK,
}
