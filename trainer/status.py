"""Where a run stands, from its directory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .events import OPEN_STATES
from .saves.sources import sources

if TYPE_CHECKING:
    from .run import RunDirectory

HELD = ("vram_gb", "ram_gb", "waits_for", "idle_exit", "on_the_way")
"""What is told of a worker, and ends with it."""


def status(run: RunDirectory) -> dict[str, Any]:
    """See ``RunDirectory.status``."""
    # The lock first: a worker writes its last state before it lets go, so a free lock makes the state final.
    alive = run.worker_alive()
    with run.log.changed:
        known = run.log.history().summary()
    found = sources(run)
    saved = next((s for s in reversed(found) if not s.fresh), None)
    # A worker says that it prepares an instant before it says where it answers.
    starting = known["state"] == "preparing" and run.locked()
    if known["state"] in OPEN_STATES and not alive and not starting:
        known["state"] = "interrupted"
    if not alive:  # whatever it held when it was measured
        known |= dict.fromkeys(HELD)
    config, rate = run.config, known["seconds_per_step"]
    return {
        "run": run.name,
        **known,
        "save_point_step": saved.step if saved else None,
        "resume_step": known["step"] if alive else (found[-1].step if found else 0),
        "images_per_second": config.recipe.batch_size / rate if rate else None,
        "worker": "alive" if alive else None,
        "saving": run.saving() if alive else None,
        "uid": run.uid,
        "rollbacks": run.rollbacks,
    }
