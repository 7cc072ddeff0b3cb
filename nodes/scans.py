"""Scans of folders, kept while nothing in them changes: Training Pictures shows them, Start uses them."""

from __future__ import annotations

from collections import OrderedDict

from ..trainer.config import DatasetConfig
from ..trainer.data.folders import state_of
from ..trainer.data.report import ScanReport
from ..trainer.data.scan import Progress, survey_folder

MOST_SAMPLES = 200_000
"""Samples of all reports that are kept together."""
_kept: OrderedDict[DatasetConfig, tuple[str, ScanReport]] = OrderedDict()


def look(config: DatasetConfig, progress: Progress) -> ScanReport:
    """``survey_folder``, which is not done twice while the folder's files stay as they are."""
    state = state_of(config.folder)  # before: what changes during the scan is seen as a change by the next one
    known = _kept.get(config)
    if known is not None and known[0] == state:
        _kept.move_to_end(config)
        return known[1]
    report = survey_folder(config, progress)
    _kept[config] = state, report
    _kept.move_to_end(config)
    while len(_kept) > 1 and sum(len(r.samples) for _, r in _kept.values()) > MOST_SAMPLES:
        _kept.popitem(last=False)
    return report
