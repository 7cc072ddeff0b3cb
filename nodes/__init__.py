"""The nodes, for ComfyUI's V3 schema. Loading them imports no torch."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import (
    compare,
    dataset,
    demo,
    doctor,
    export,
    loss_plot,
    memory,
    merge_lora,
    model,
    open_run,
    optimizer,
    preview,
    recipe,
    run,
    run_model,
    search,
    words,
)

try:  # the panel's routes need a running server; the nodes do not need the panel
    from . import routes
except ImportError:
    routes = None


class FluxFullFineTune(ComfyExtension):
    """All nodes of the pack, in the order of a graph."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [search.findable(words.guarded(node)) for node in (
            model.FluxFFTModel,
            merge_lora.FluxFFTMergeLoRA,
            dataset.FluxFFTDataset,
            dataset.FluxFFTPictureSettings,
            dataset.FluxFFTCaptionSettings,
            optimizer.FluxFFTOptimizerNAdam,
            optimizer.FluxFFTOptimizerAdan,
            memory.FluxFFTMemory,
            recipe.FluxFFTRecipe,
            run.FluxFFTStart,
            open_run.FluxFFTOpenRun,
            run.FluxFFTTrainSteps,
            preview.FluxFFTPreviewSettings,
            preview.FluxFFTPreview,
            compare.FluxFFTCompare,
            run_model.FluxFFTRunModel,
            loss_plot.FluxFFTLossPlot,
            export.FluxFFTExport,
            demo.FluxFFTDemo,
            doctor.FluxFFTDoctor,
        )]


async def comfy_entrypoint() -> ComfyExtension:
    return FluxFullFineTune()
