"""A run's weights-only checkpoints among ComfyUI's models: a link to each of them, in models/diffusion_models/flux_fft.

Why links, and not ``folder_paths.add_model_folder_path`` of the run's folder: ComfyUI keeps the time of every folder
that it has listed, and asks for it again before it answers from its memory; where such a folder is gone, as that of a
run that was deleted or moved, each list of diffusion models ends with FileNotFoundError until the server is restarted.
The folder above, which stays, holds the cache too: its latents would be listed as models. A link whose file is gone is
only passed over; it is removed when the next one is made. Tried on 0.3.64 and 0.33.0.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trainer.run import RunDirectory

log = logging.getLogger(__name__)
FOLDER = "flux_fft"


def list_checkpoints(run: RunDirectory) -> None:
    """Have ComfyUI's loaders list the run's checkpoints. Where links cannot be made (Windows asks for a right), or
    nothing may be written, they are not: they can be exported, or loaded by their path."""
    import folder_paths

    found = run.checkpoints()
    roots = [Path(path) for path in folder_paths.get_folder_paths("diffusion_models")]
    folder = next((p for p in roots if p.name == "diffusion_models"), roots[0]) / FOLDER
    try:
        if found:
            folder.mkdir(parents=True, exist_ok=True)
        for link in folder.iterdir() if folder.is_dir() else ():
            if link.is_symlink() and not link.exists():
                link.unlink()
        for one in found:
            _link(folder / one.path.name, one.path.resolve())
    except OSError as error:
        log.info("the checkpoints of run %r are not among ComfyUI's models: %s", run.name, error.strerror or error)


def _link(link: Path, path: Path) -> None:
    if link.is_symlink() and link.resolve() != path:  # of another run that was called so
        link.unlink()
    if not link.exists():
        os.symlink(path, link)
