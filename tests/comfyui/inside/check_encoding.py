"""Texts and pixels as the bridge has ComfyUI encode them, and encoders told apart."""

from __future__ import annotations

from given import refused, tiny_clip


def check_text_has_the_length_asked_for() -> None:
    import torch
    from pack.nodes import bridge

    clip = tiny_clip()
    for length in (512, 256):
        context, pooled = bridge.encode_text(clip, "a cat", length)
        assert context.shape == (length, 96) and pooled.shape == (64,)
        assert (context.dtype, pooled.dtype) == (torch.bfloat16, torch.float32)
    long, _ = bridge.encode_text(clip, "word " * 1000, 256)
    assert long.shape == (256, 96)
    # As ComfyUI itself encodes a short text, which it pads to 256.
    plain, plain_pooled = clip.encode_from_tokens(clip.tokenize("a cat"), return_pooled=True)
    ours, pooled = bridge.encode_text(clip, "a cat", 256)
    assert plain.shape[1] == 256
    assert torch.equal(ours, plain[0].bfloat16()) and torch.equal(pooled, plain_pooled[0])


def check_texts_in_a_batch_are_encoded_as_each_alone() -> None:
    import torch
    from pack.nodes import bridge, bridge_text

    clip = tiny_clip()
    texts = ["a cat", "", "a (cat:1.5), " * 40, "word " * 300]
    for length in (512, 256):
        found = bridge_text.encode_texts(clip, texts, length)
        assert len(found) == 4
        for (context, pooled), text in zip(found, texts, strict=True):
            alone, alone_pooled = bridge.encode_text(clip, text, length)
            assert context.shape == alone.shape == (length, 96) and pooled.shape == (64,)
            assert (context.dtype, pooled.dtype) == (torch.bfloat16, torch.float32)
            assert torch.allclose(context.float(), alone.float(), atol=0.02, rtol=0.02)
            assert torch.allclose(pooled, alone_pooled, atol=1e-5)
            assert context.untyped_storage().nbytes() == context.nbytes, "no view of the whole batch"
    assert not torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])

    class Other:  # some pack's own CLIP: one after the other
        tokenize, encode_from_tokens = staticmethod(clip.tokenize), staticmethod(clip.encode_from_tokens)

    one, two = bridge_text.encode_texts(Other(), texts[:2], 256)
    assert torch.allclose(one[0].float(), found[0][0].float(), atol=0.02) and two[0].shape == (256, 96)


def check_tokens_are_counted_as_they_are_cut() -> None:
    from pack.nodes import bridge_text

    clip = tiny_clip()
    for count in (bridge_text.token_counter(clip), bridge_text.token_counter()):
        assert count("") == 1, "the end token"
        words = count("word " * 300)
        assert words == 301
        assert count("word " * 300 + "word") == words + 1
        assert count("(word)") > count("word")


def check_a_long_text_ends_with_the_end_token() -> None:
    from pack.nodes import bridge

    tokens = [(n + 5, 1.0) for n in range(9)] + [(1, 1.0)]
    assert bridge.fixed_length(tokens, 6) == [(5, 1.0), (6, 1.0), (7, 1.0), (8, 1.0), (9, 1.0), (1, 1.0)]
    assert bridge.fixed_length(tokens, 12) == [*tokens, (0, 1.0), (0, 1.0)]
    assert bridge.fixed_length(tokens, 10) == tokens


def check_brackets_are_words_and_no_weights() -> None:
    import torch
    from pack.nodes import bridge

    clip = tiny_clip()
    weighted, _ = bridge.encode_text(clip, "a (cat:1.5)", 256)
    tokens = clip.tokenize(r"a \(cat:1.5\)")
    assert all(weight == 1.0 for _, weight in tokens["t5xxl"][0])
    plain, _ = bridge.encode_text(clip, "a cat:1.5", 256)
    assert not torch.equal(weighted, plain), "the brackets are in the text"


def check_pixels_become_model_space_latents() -> None:
    import comfy.sd
    import comfy.taesd.taesd
    import torch
    from pack.nodes import bridge

    net = comfy.taesd.taesd.TAESD(latent_channels=16)
    weights = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) * 0.1 if v.ndim else v
               for k, v in net.state_dict().items()}
    vae = comfy.sd.VAE(sd=weights)
    pixels = torch.rand(2, 32, 48, 3, generator=torch.Generator().manual_seed(2))
    latents = bridge.encode_pixels(vae, pixels.clone())
    raw = vae.encode(pixels.clone())
    assert latents.shape == (2, 16, 4, 6) and latents.dtype == torch.float32
    assert torch.allclose(latents, (raw - 0.1159) * 0.3611, atol=1e-5)


def check_live_encoders_are_told_apart_by_what_they_compute() -> None:
    import comfy.sd
    import torch
    from pack.nodes.bridge_text import content_id

    one, two, three = tiny_clip(), tiny_clip(), tiny_clip()
    next(three.cond_stage_model.t5xxl.parameters()).data += 1
    assert content_id(one) == content_id(two) != content_id(three)
    layer, (rows, columns) = next((n, p.shape) for n, p in one.cond_stage_model.clip_l.named_parameters()
                                  if n.endswith("mlp.fc1.weight"))
    name = "lora_te_" + layer.removeprefix("transformer.").removesuffix(".weight").replace(".", "_")

    def with_lora(value: float, strength: float) -> str:
        lora = {f"{name}.lora_up.weight": torch.full((rows, 2), value),
                f"{name}.lora_down.weight": torch.ones(2, columns)}
        patched = comfy.sd.load_lora_for_models(None, two, lora, 0, strength)[1]
        assert patched.patcher.patches, "the LoRA fits"
        return content_id(patched)

    ids = [content_id(one), with_lora(1.0, 1.0), with_lora(2.0, 1.0), with_lora(1.0, 0.5)]
    assert len(set(ids)) == 4 and ids[1] == with_lora(1.0, 1.0) and content_id(two) == ids[0]


def check_kept_objects_are_few() -> None:
    from pack.nodes import bridge

    keys = [bridge.keep(thing := object()) for _ in range(bridge.KEPT + 3)]
    assert bridge.kept(keys[-1], "CLIP") is thing
    assert "CLIP" in refused(lambda: bridge.kept("gone", "CLIP"))
    assert len(bridge._kept) == bridge.KEPT
    assert bridge.keep(None) == ""
