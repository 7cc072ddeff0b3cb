"""LoRAs merged by the pack against those that ComfyUI loads: run by ComfyUI's interpreter (see ``test_intake``).

``python loras.py PACK FOLDER`` prints a JSON object: for each spelling the largest difference of a weight, and
the largest change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

C, RANK = 256, 4
SIZES = {"image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 64,
         "context_in_dim": 128, "hidden_size": C, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2,
         "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True,
         "guidance_embed": True}  # fmt: skip


def tensor(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.1


def loras() -> dict[str, dict[str, Any]]:
    import torch

    a, b = tensor(RANK, C), tensor(3 * C, RANK)
    kohya, ours, theirs = "lora_unet_double_blocks_0_img_attn_qkv", "diffusion_model.single_blocks.1", "transformer"
    return {
        "kohya": {f"{kohya}.lora_down.weight": a, f"{kohya}.lora_up.weight": b, f"{kohya}.alpha": torch.tensor(2.0)},
        "comfyui": {f"{ours}.linear2.lora_A.weight": tensor(RANK, 5 * C), f"{ours}.linear2.lora_B.weight": b[:C],
                    f"{ours}.modulation.lin.diff": tensor(3 * C, C), f"{ours}.modulation.lin.diff_b": tensor(3 * C)},
        "diffusers": {f"{theirs}.{m}.lora_{end}.weight": t for m, up in (
            ("transformer_blocks.1.attn.add_v_proj", b[:C]), ("single_transformer_blocks.0.attn.to_k", b[:C]),
            ("single_transformer_blocks.0.proj_mlp", tensor(4 * C, RANK)), ("transformer_blocks.0.ff.net.0.proj",
             tensor(4 * C, RANK)), ("x_embedder", b[:C])) for end, t in (("A", a if m != "x_embedder" else
             tensor(RANK, 64)), ("B", up))},
        "onetrainer": {"lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight": a,
                       "lora_transformer_transformer_blocks_0_attn_to_q.lora_up.weight": b[:C],
                       "lora_transformer_transformer_blocks_0_attn_to_q.alpha": torch.tensor(1.0)},
        "lokr": {"lycoris_single_transformer_blocks_1_proj_out.lokr_w1": tensor(8, 4),
                 "lycoris_single_transformer_blocks_1_proj_out.lokr_w2_a": tensor(C // 8, RANK),
                 "lycoris_single_transformer_blocks_1_proj_out.lokr_w2_b": tensor(RANK, 5 * C // 4),
                 "lycoris_single_transformer_blocks_1_proj_out.alpha": torch.tensor(3.0)},
        "loha": {"lora_unet_double_blocks_1_txt_mlp_0.hada_w1_a": tensor(4 * C, RANK),
                 "lora_unet_double_blocks_1_txt_mlp_0.hada_w1_b": a, "lora_unet_double_blocks_1_txt_mlp_0.hada_w2_a":
                 tensor(4 * C, RANK) + 1, "lora_unet_double_blocks_1_txt_mlp_0.hada_w2_b": a + 1,
                 "lora_unet_double_blocks_1_txt_mlp_0.alpha": torch.tensor(2.0)},
        "swapped": {"transformer.norm_out.linear.lora_A.weight": a, "transformer.norm_out.linear.lora_B.weight":
                    b[: 2 * C]},
    }  # fmt: skip


def main() -> None:
    pack, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, ".")
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.ldm.flux.model
    import comfy.model_base
    import comfy.model_patcher
    import comfy.sd
    import comfy.supported_models
    import torch
    from given import load_pack
    from safetensors.torch import save_file

    import nodes  # noqa: F401

    load_pack(pack)
    from pack.trainer.config import LoraConfig
    from pack.trainer.flux.intake import open_source
    from pack.trainer.flux.variants import require_flux

    fields = comfy.ldm.flux.model.FluxParams.__dataclass_fields__
    config = comfy.supported_models.Flux(SIZES | ({"txt_ids_dims": []} if "txt_ids_dims" in fields else {}))
    config.set_inference_dtype(torch.float32, None)
    model = comfy.model_base.Flux(config, device=torch.device("cpu"))
    net = model.diffusion_model
    for name, parameter in net.named_parameters():
        parameter.data = tensor(*parameter.shape) + len(name) / 1000
    save_file({k: v.contiguous() for k, v in net.state_dict().items()}, folder / "flux.safetensors")
    info = require_flux(folder / "flux.safetensors")
    found: dict[str, Any] = {}
    for spelling, tensors in loras().items():
        path = folder / f"{spelling}.safetensors"
        save_file({k: v.clone() for k, v in tensors.items()}, path)
        cpu = torch.device("cpu")
        patcher = comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
        patched = comfy.sd.load_lora_for_models(patcher, None, dict(tensors), 0.7, 0.0)[0]
        before = {k: v.clone() for k, v in net.state_dict().items()}
        patched.patch_model()
        apart = changed = 0.0
        with open_source(info.path, info, [LoraConfig(path=str(path), strength=0.7)]) as source:
            for name, shape in source.shapes.items():
                theirs = net.state_dict()[info.tensor_name(name)]
                apart = max(apart, float((source.read(name).view(shape) - theirs).abs().max()))
                changed = max(changed, float((before[info.tensor_name(name)] - theirs).abs().max()))
        patched.unpatch_model()
        found[spelling] = {"apart": apart, "changed": changed}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
