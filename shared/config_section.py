"""What every section of a configuration is, and how a key is declared with all that CONFIG.md says of it.

Used by `learner/config/schema.py`, `rollout_server/config.py` and `deploy/launch.py`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Frozen; unknown keys are refused; nothing is converted (an integer for a number aside); NaN is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def key(meaning: str, default: Any = ..., *, unit: str = "", req: str = "", **bounds: Any) -> Any:
    """A pydantic field. `meaning`, `unit` and `req` (requirement ids) go to CONFIG.md and the JSON Schema.

    Without a default the key is required. `bounds` are pydantic's `ge`, `gt`, `le`, `lt`, `min_length`.
    """
    extra: dict[str, Any] = {name: text for name, text in (("unit", unit), ("requirement", req)) if text}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)
