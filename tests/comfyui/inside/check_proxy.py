"""The MODEL without weights: what it is asked while sampling, and what it refuses."""

from __future__ import annotations

from typing import Any

from given import proxy, refused, sample


def check_the_proxy_asks_for_what_the_sampler_shows_it() -> None:
    import torch

    asked = []

    def predict(x: Any, timestep: Any, context: Any, pooled: Any, guidance: Any) -> Any:
        asked.append((x, timestep, context, pooled, guidance))
        return torch.ones_like(x)

    noise = torch.randn(1, 16, 6, 8, generator=torch.manual_seed(1))
    latent = sample(proxy(predict=predict), steps=4)
    assert latent.shape == (1, 16, 6, 8)
    levels = [float(t[1]) for t in asked]
    assert levels[0] == 1.0 and levels == sorted(levels, reverse=True) and 0 < levels[-1] < 1
    for x, timestep, context, pooled, guidance in asked:
        assert x.shape == (1, 16, 6, 8) and context.shape == (1, 7, 96) and pooled.shape == (1, 64)
        assert {t.dtype for t in (x, timestep, context, pooled, guidance)} == {torch.float32}
        assert {t.device.type for t in (x, timestep, context, pooled, guidance)} == {"cpu"}
        assert guidance.tolist() == [2.5]
    # A constant velocity of 1 leads from the noise at level 1 to noise - 1 in model space.
    assert torch.allclose(asked[0][0], noise, atol=1e-6)
    assert torch.allclose(latent, (noise - 1) / 0.3611 + 0.1159, atol=1e-4)


def check_a_flux_without_guidance_is_asked_without() -> None:
    asked = []

    def predict(x: Any, timestep: Any, context: Any, pooled: Any, guidance: Any) -> Any:
        asked.append((float(timestep), guidance))
        return x * 0

    sample(proxy({"guidance_embed": False}, predict), steps=4)
    assert [g for _, g in asked] == [None] * 4
    # schnell: no shift, so four steps are evenly spaced.
    assert [round(t, 3) for t, _ in asked] == [1.0, 0.75, 0.5, 0.25]


def check_the_proxy_takes_no_memory() -> None:
    model = proxy()
    assert model.model.memory_required([2, 16, 128, 128]) == 0
    assert model.model_size() < 100_000, "the schedule's table, no weights"
    assert list(model.model.diffusion_model.parameters()) == []
    assert type(model.clone()) is type(model)


def check_what_cannot_be_honoured_is_refused() -> None:
    import comfy.sd
    import torch

    model = proxy()
    assert "LoRA" in refused(lambda: comfy.sd.load_lora_for_models(
        model, None, {"diffusion_model.img_in.lora_A.weight": torch.zeros(2, 64),
                      "diffusion_model.img_in.lora_B.weight": torch.zeros(64, 2)}, 1.0, 0.0))
    assert "attention" in refused(lambda: model.clone().set_model_attn1_replace(lambda *a: a, "double_block", 0))
    assert "patch" in refused(lambda: model.clone().set_model_attn1_patch(lambda *a: a))
    for key, what, value in (("patches", "patches", {"attn1_patch": [print]}),
                             ("patches_replace", "attention", {"dit": {("double_block", 0): print}}),
                             ("optimized_attention_override", "attention", print),
                             ("rope_options", "RoPE", {"scale_x": 2})):
        patched = model.clone()
        patched.model_options.setdefault("transformer_options", {})[key] = value
        assert what in refused(lambda patched=patched: sample(patched))
    net = model.model.diffusion_model
    inputs = (torch.zeros(1, 16, 6, 8), torch.ones(1), torch.zeros(1, 7, 96), torch.zeros(1, 64), torch.ones(1))
    assert "ControlNet" in refused(lambda: net(*inputs, control={"input": []}))
    assert "reference" in refused(lambda: net(*inputs, ref_latents=[inputs[0]]))
    assert "mask" in refused(lambda: net(*inputs, attention_mask=torch.ones(1, 1)))
    assert "guidance" in refused(lambda: net(*inputs[:4], None))
    wide = (torch.ones(7, 128), torch.ones(64))
    assert "128" in refused(lambda: sample(model, positive=wide, negative=wide))


def check_a_model_without_weights_is_neither_saved_nor_merged() -> None:
    import os
    import tempfile

    import comfy.sd
    import comfy_extras.nodes_model_merging as merging

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "saved.safetensors")
        assert "saving" in refused(lambda: comfy.sd.save_checkpoint(path, proxy()))
        assert not os.path.exists(path)
    assert "merging" in refused(lambda: merging.ModelMergeSimple().merge(proxy(), proxy(), 0.5))


def check_wrappers_of_other_packs_are_called() -> None:
    import comfy.patcher_extension

    seen = []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return executor(*args, **kwargs)

    model = proxy()
    model.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, wrapper)
    sample(model)
    assert len(seen) == 3


def check_an_error_in_the_worker_reaches_the_user() -> None:
    def predict(*_: Any) -> Any:
        raise ValueError("the run is at step 5")

    assert "step 5" in refused(lambda: sample(proxy(predict=predict)))


def check_cancel_is_heard_between_short_predictions() -> None:
    import comfy.model_management
    from pack.nodes import registry

    asked = []

    def predict(x: Any, *_: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:
            comfy.model_management.interrupt_current_processing()
        return registry.cancellable(lambda: x * 0)

    try:
        sample(proxy(predict=predict), steps=50)
        raise AssertionError("sampling went on")
    except comfy.model_management.InterruptProcessingException:
        assert len(asked) <= 4


def check_the_worker_parks_at_the_end_of_sampling() -> None:
    from pack.nodes import bridge_model

    flux, order = {"context_in_dim": 96, "vec_in_dim": 64, "guidance_embed": True}, []

    def predict(x: Any, *_: Any) -> Any:
        order.append("predicted")
        return x * 0

    model = bridge_model.proxy_model(flux, predict, lambda: order.append("parked"))
    sample(model.clone(), steps=3)
    assert order == ["predicted"] * 3 + ["parked"]
