"""Settings: lossless JSON, and one clear line for whatever is wrong."""

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import config as c
from trainer.settings import from_dict, to_dict


def example(**changes) -> c.RunConfig:
    return c.RunConfig(
        **{"name": "a run", "model": c.ModelConfig(flux="f"), "dataset": c.DatasetConfig(folder="d"), **changes}
    )


def test_json_loses_nothing():
    run = example(optimizer=c.OptimizerConfig(kind="adan", lr=3.3e-5, betas=(0.98, 0.92, 0.99)))
    assert from_dict(c.RunConfig, json.loads(json.dumps(to_dict(run)))) == run


@given(lr=st.floats(0, 1), seed=st.integers(0, 2**64 - 1), dropout=st.floats(0, 1))
def test_json_loses_nothing_of_numbers(lr, seed, dropout):
    run = example(
        optimizer=c.OptimizerConfig(lr=lr), recipe=c.RecipeConfig(training_seed=seed, caption_dropout=dropout)
    )
    assert from_dict(c.RunConfig, json.loads(json.dumps(to_dict(run)))) == run


def test_defaults_are_the_authors():
    assert c.OptimizerConfig().lr == 3.5e-6 and c.OptimizerConfig().cautious and c.OptimizerConfig().weight_decay == 0
    assert c.RecipeConfig().batch_size == 5 and c.RecipeConfig().guidance == 1.0


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: c.OptimizerConfig(lr=-1e-6), "learning rate is -1e-06"),
        (lambda: c.OptimizerConfig(lr=float("nan")), "learning rate is nan"),
        (lambda: c.OptimizerConfig(lr=float("inf")), "learning rate is inf"),
        (lambda: c.OptimizerConfig(kind="sgd"), "nadam, adan"),
        (lambda: c.OptimizerConfig(kind="adan"), "adan takes 3"),
        (lambda: c.OptimizerConfig(betas=(0.9, 1.0)), "below 1"),
        (lambda: c.DatasetConfig(folder=" "), "dataset folder is empty"),
        (lambda: c.DatasetConfig(folder="x", bucket_step=24), "multiple of 16"),
        (lambda: c.DatasetConfig(folder="x", resolution=32), "at least bucket_step"),
        (lambda: c.RecipeConfig(lr_schedule="cosine"), "schedule_steps is 0"),
        (lambda: c.RecipeConfig(batch_size=0), "batch_size is 0"),
        (lambda: c.RecipeConfig(batch_size=True), "batch_size is True"),
        (lambda: c.MemoryConfig(device="gpu"), "device is 'gpu'"),
        (lambda: c.ModelConfig(flux=""), "flux model is empty"),
        (lambda: example(format_version=99), "format_version is 99"),
    ],
)
def test_each_error_names_the_input_in_one_line(build, words):
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a/b", "a\\b", "..", "", " ", "a\nb", "con", "NUL.txt", "cache", ".hidden", "end.", "x" * 101]
)
def test_names_that_cannot_be_a_folder_everywhere(name):
    with pytest.raises(ValueError, match="run name"):
        c.check_name(name)


@pytest.mark.parametrize("name", ["my_flux", "Portraits 2", "caf\u00e9", "v1.0"])
def test_names_that_can(name):
    assert c.check_name(name) == name


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d["recipe"].update(batch="5"), "recipe has unknown settings batch"),
        (lambda d: d["recipe"].update(batch_size="5"), "recipe.batch_size is '5'"),
        (lambda d: d.pop("model"), "lacks model"),
        (lambda d: d.update(optimizer=[]), "optimizer: expected an object"),
        (lambda d: d["optimizer"].update(betas=["a", "b"]), "betas is 'a'"),
    ],
)
def test_a_damaged_file_is_named(change, words):
    data = to_dict(example())
    change(data)
    with pytest.raises(ValueError, match=words):
        from_dict(c.RunConfig, data)


def test_every_field_is_documented():
    import ast
    import inspect

    classes = {n.name: n for n in ast.parse(inspect.getsource(c)).body if isinstance(n, ast.ClassDef)}
    for name, node in classes.items():
        if not dataclasses.is_dataclass(getattr(c, name)):
            continue
        for at, line in enumerate(node.body):
            if isinstance(line, ast.AnnAssign):
                after = node.body[at + 1] if at + 1 < len(node.body) else None
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{name}.{ast.unparse(line.target)} has no docstring"


def test_sets_within_sets_come_back_equal():
    more = c.DatasetConfig(folder="b", repeats=3, weight=0.5, also=(c.DatasetConfig(folder="c"),))
    data = c.DatasetConfig(folder="a", more_resolutions=(512, 768), also=(more,))
    model = c.ModelConfig(flux="f", loras=(c.LoraConfig(path="l", strength=-0.5),))
    run = c.RunConfig(name="r", model=model, dataset=data)
    assert from_dict(c.RunConfig, json.loads(json.dumps(to_dict(run)))) == run


@pytest.mark.parametrize("settings, line", [
    ({"background": "white"}, "background is 'white': give a colour as #rrggbb"),
    ({"missing_captions": "fixed"}, "fixed_caption is empty"),
    ({"more_resolutions": (8,)}, "more_resolutions is 8"),
    ({"weight": 0.0}, "weight is 0.0: give a number above 0"),
    ({"validation_share": 0.9}, "validation_share is 0.9: give a number at least 0 and at most 0.5"),
    ({"crop": "left"}, "crop is 'left': choose one of centre, top, focus"),
])  # fmt: skip
def test_dataset_settings_are_checked(settings, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        c.DatasetConfig(folder="a", **settings)
