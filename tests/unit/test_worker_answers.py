"""What a worker in this process answers: predictions of its weights, to many at once, and exports."""

import json
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from workers import SLOW, make, wait_for_state

from trainer.client import RunMovedOn
from trainer.loop import Trainer


def test_predictions_are_those_of_the_weights_at_the_step_asked_for(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    x, t = torch.randn(2, 16, 8, 8), torch.tensor([0.3, 0.8])
    context, pooled, guidance = torch.randn(2, 6, 128), torch.randn(2, 64), torch.tensor([3.5, 1.0])
    inputs = (x, t, context, pooled, guidance)
    before = client.predict(*inputs, step=0)
    trainer = Trainer(run.config, run.path, dataset=run.dataset)
    assert torch.equal(before, trainer.predict(*inputs))
    client.train(2)
    wait_for_state(client, "finished")
    for _ in range(2):
        trainer.train_step()
    after = client.predict(*inputs, step=2)
    assert torch.equal(after, trainer.predict(*inputs)) and not torch.equal(after, before)
    assert torch.equal(client.predict(*inputs), after)
    assert not torch.equal(client.predict(x, t, context, pooled, guidance * 2), after)
    with pytest.raises(RunMovedOn, match="at step 2 and this handle is of step 0.*`after` input"):
        client.predict(*inputs, step=0)
    with pytest.raises((ValueError, RuntimeError)):
        client.predict(x, t, context[:, :, :5], pooled, guidance)
    assert torch.equal(client.predict(*inputs), after)  # and the worker lives on
    assert client.evaluate() == {"step": 2, "loss": trainer.evaluate()}


def test_clients_in_many_threads_get_their_own_answers(tiny, serve):
    run = make(tiny, **SLOW)
    _, client = serve(run)
    wait_for_state(client, "paused")
    client.train(10_000)
    inputs = [(torch.randn(1, 16, 4, 4), torch.rand(1), torch.randn(1, 6, 128), torch.randn(1, 64), torch.ones(1))
              for _ in range(4)]
    failures = []

    def predict(one):
        for _ in range(3):
            shape = client.predict(*one).shape
            if shape != one[0].shape or client.status(wait=0.05)["run"] != run.name:
                failures.append(shape)

    threads = [threading.Thread(target=predict, args=(one,)) for one in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    client.pause()
    assert not failures
    expected = [client.predict(*one) for one in inputs]
    results = [None] * 4
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, client.predict(*inputs[i])))
               for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_export_writes_the_weights_and_the_recipe_but_no_path_and_no_caption(tiny, serve, tmp_path):
    run = make(tiny)
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    out = tmp_path / "out.safetensors"
    done = client.export(out, "f32", {"modelspec.title": "My model"})
    text = f"f32, step 2, {out.stat().st_size / 1e6:.1f} MB"
    assert done == {"path": str(out), "bytes": out.stat().st_size, "step": 2, "dtype": "f32", "text": text}
    trainer = Trainer(run.config, run.path, dataset=run.dataset)
    trainer.load(run.latest_save_point().path)
    exported = load_file(out)
    assert all(torch.equal(exported[n], p) for n, p in trainer.model.named_parameters())
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert about["modelspec.sai_model_spec"] == "1.0.1" and about["modelspec.architecture"] == "flux-1-dev"
    assert (about["modelspec.title"], about["flux_fft.steps"], about["flux_fft.dtype"]) == ("My model", "2", "f32")
    recipe = json.loads(about["flux_fft.recipe"])
    assert recipe["optimizer"]["lr"] == 1e-3 and json.loads(about["flux_fft.dataset"])["pictures"] == 7
    text = json.dumps(about)
    assert str(tmp_path) not in text and "flux.safetensors" not in text and "folder" not in text
    before = out.read_bytes()
    with pytest.raises(ValueError, match="exists: choose another name"):
        client.export(out, "bf16")
    with pytest.raises(ValueError, match="dtype is 'f8'"):
        client.export(tmp_path / "other.safetensors", "f8")
    with pytest.raises(ValueError, match="does not exist"):
        client.export(tmp_path / "nowhere" / "x.safetensors", "bf16")
    assert out.read_bytes() == before and not list(tmp_path.glob("*.part")) and len(list(tmp_path.iterdir())) == 2
    client.export(out, "bf16", overwrite=True)
    assert load_file(out)["img_in.weight"].dtype == torch.bfloat16
