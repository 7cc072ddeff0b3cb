"""The bridge's other half: a run as a ComfyUI MODEL, and sampling it. Tried on 0.3.64 and 0.33.0, on a CPU.

With ``bridge.py`` the only user of ComfyUI's internals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

REFUSED = {"patches": "patches", "patches_replace": "attention patches", "optimized_attention_override": "attention "
                                                                                                         "overrides",
           "rope_options": "RoPE options"}
Predict = Callable[..., Any]
"""(x, timestep, context, pooled, guidance | None) -> velocity: CPU tensors in and out."""


def _refuse(what: str) -> None:
    raise ValueError(f"{what} cannot be used on a run's MODEL, whose weights are in training: remove that node, "
                     "or export a checkpoint and use it there")


def proxy_model(flux: dict[str, Any], predict: Predict, done: Callable[[], None] | None = None) -> Any:
    """A ComfyUI MODEL without weights: sampling it asks ``predict`` for the velocity, and calls ``done`` at its end.

    ``flux``: the fields of FluxParams. Patches and conditions that the worker cannot honour raise ``ValueError``.
    """
    import comfy.model_base
    import comfy.model_management
    import comfy.patcher_extension
    import comfy.supported_models
    import torch

    guided = bool(flux["guidance_embed"])
    kind = comfy.supported_models.Flux if guided else comfy.supported_models.FluxSchnell
    config = kind({"image_model": "flux", "guidance_embed": guided, "in_channels": 16, "out_channels": 16,
                   "context_in_dim": flux["context_in_dim"], "vec_in_dim": flux["vec_in_dim"]})
    config.set_inference_dtype(torch.float32, None)  # nothing is rounded on the way to the worker
    base, patcher, unet = _proxy_classes()
    sampling = comfy.model_base.ModelType.FLUX if guided else comfy.model_base.ModelType.FLOW
    device = comfy.model_management.get_torch_device()

    def build(device: Any = None, **_: Any) -> Any:
        return unet(flux, predict)

    model = base(config, model_type=sampling, device=device, unet_model=build)
    made = patcher(model, load_device=device, offload_device=torch.device("cpu"))
    if done is not None:
        made.add_callback(comfy.patcher_extension.CallbacksMP.ON_CLEANUP, lambda _: done())
    return made


def load_model(weights: dict[str, Tensor]) -> Any:
    """ComfyUI's own MODEL of a Flux's weights, which it takes over. ``ValueError`` where it knows no such Flux."""
    import comfy.sd

    try:
        model = comfy.sd.load_diffusion_model_state_dict(weights)
        why = "it knows no such Flux"
    except RuntimeError as error:  # sizes that it has not thought of: 0.3.64 knows one width only
        model, why = None, " ".join(str(error).split())[:200]
    if model is None:
        raise ValueError(f"this ComfyUI cannot load the run's weights as a model ({why}): open the run at its latest"
                         " step instead")
    return model


@functools.cache
def _proxy_classes() -> tuple[Any, Any, Any]:
    import comfy.model_base
    import comfy.model_patcher
    import comfy.patcher_extension
    import torch

    class Proxy(torch.nn.Module):
        """Stands where ComfyUI expects its Flux module."""

        patch_size = 2

        def __init__(self, flux: dict[str, Any], predict: Predict) -> None:
            super().__init__()
            self.dtype, self.flux, self.predict = torch.float32, flux, predict

        def forward(self, x: Tensor, timestep: Tensor, context: Tensor, y: Tensor | None = None,
                    guidance: Tensor | None = None, ref_latents: Any = None, control: Any = None,
                    transformer_options: dict[str, Any] | None = None, **kwargs: Any) -> Tensor:
            options = transformer_options or {}
            extension = comfy.patcher_extension
            wrappers = extension.get_all_wrappers(extension.WrappersMP.DIFFUSION_MODEL, options)
            run = extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
            return run.execute(x, timestep, context, y, guidance, ref_latents, control, options, **kwargs)

        def _forward(self, x: Tensor, timestep: Tensor, context: Tensor, y: Tensor | None, guidance: Tensor | None,
                     ref_latents: Any, control: Any, options: dict[str, Any], **kwargs: Any) -> Tensor:
            for given, what in ((control, "a ControlNet"), (ref_latents, "reference latents"),
                                (kwargs.get("attention_mask"), "an attention mask")):
                if given is not None:
                    _refuse(what)
            for key, what in REFUSED.items():
                if options.get(key):
                    _refuse(what)
            width = self.flux["context_in_dim"]
            if context.shape[-1] != width:
                raise ValueError(f"the conditioning is {context.shape[-1]} wide and this Flux takes {width}: "
                                 "encode the prompt with the text encoders that the run was trained with")
            if y is None:
                y = x.new_zeros(x.shape[0], self.flux["vec_in_dim"])
            if not self.flux["guidance_embed"]:
                guidance = None
            elif guidance is None:
                _refuse("conditioning without guidance (Flux Disable Guidance)")
            values = [None if t is None else t.detach().float().cpu() for t in (x, timestep, context, y, guidance)]
            return self.predict(*values).to(x)

    class ProxyFlux(comfy.model_base.Flux):
        def memory_required(self, *args: Any, **kwargs: Any) -> int:
            return 0

        def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("saving or merging")

    class ProxyPatcher(comfy.model_patcher.ModelPatcher):
        """Refuses at once what would have to change weights or attention."""

        def add_patches(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("a LoRA")

        def add_hook_patches(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("a LoRA hook")

        def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("saving or merging")

        def get_key_patches(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("saving or merging")

        def add_weight_wrapper(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("a weight wrapper")

        def set_model_patch(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("a model patch")

        def set_model_patch_replace(self, *args: Any, **kwargs: Any) -> Any:
            _refuse("an attention patch")

    return ProxyFlux, ProxyPatcher, Proxy


def load_file(path: str, loras: Sequence[tuple[str, float]] = ()) -> Any:
    """ComfyUI's MODEL of a Flux file, with LoRAs (path, strength) on it: its own loader places it as memory allows."""
    import comfy.sd
    import comfy.utils

    try:
        model = comfy.sd.load_diffusion_model(path)
    except RuntimeError as error:  # of sizes or names that it does not know
        raise ValueError(f"this ComfyUI cannot load {path} ({' '.join(str(error).split())[:200]})") from None
    for lora, strength in loras:
        tensors = comfy.utils.load_torch_file(lora, safe_load=True)
        model, _ = comfy.sd.load_lora_for_models(model, None, tensors, strength, 0)
    return model


def samplers() -> tuple[list[str], list[str]]:
    """Names of ComfyUI's samplers and schedulers."""
    import comfy.samplers

    return list(comfy.samplers.KSampler.SAMPLERS), list(comfy.samplers.KSampler.SCHEDULERS)


def sample(model: Any, *, positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor], width: int, height: int,
           seed: int, steps: int, cfg: float, sampler: str, scheduler: str, guidance: float) -> Tensor:
    """Latent [1, 16, H/8, W/8] in the VAE's space, by ComfyUI's own KSampler.

    Conditions are (context [T, D], pooled [P]).
    """
    import comfy.sample
    import torch

    def condition(pair: tuple[Tensor, Tensor]) -> list:
        return [[pair[0][None].float(), {"pooled_output": pair[1][None].float(), "guidance": guidance}]]

    empty = torch.zeros(1, 16, height // 8, width // 8)
    noise = comfy.sample.prepare_noise(empty, seed)
    return comfy.sample.sample(model, noise, steps, cfg, sampler, scheduler, condition(positive), condition(negative),
                               empty, disable_pbar=True, seed=seed)
