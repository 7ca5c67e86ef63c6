"""Recent retention: the newest entries alone (a control)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvrl.cache.policies.streaming import Streaming


class Recent(Streaming):
    """The newest entries, without sinks: what a plain sliding window keeps."""

    name: ClassVar[str] = "recent"
    paper: ClassVar[str] = "control, as in arXiv 2605.06850"

    sinks: int = Field(0, ge=0, description="first tokens that always stay")
