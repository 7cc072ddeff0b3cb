"""What nodes take from a graph and say of it: names, numbers, folders, and errors in one line."""

from __future__ import annotations

import traceback
from typing import Any

from given import refused


def check_what_leaves_a_node_is_one_line_that_can_be_sent() -> None:
    import errno
    import logging

    from comfy_api.latest import io
    from pack.nodes import words

    logging.disable(logging.CRITICAL)
    name = "mod\udce9.safetensors"

    def said(error: Exception, **inputs: Any) -> tuple[type, str]:
        class Node(io.ComfyNode):
            @classmethod
            def execute(cls, **_: Any) -> Any:
                try:
                    raise OSError(name)  # what it came of is no better
                except OSError:
                    raise error  # noqa: B904

        try:
            words.guarded(Node).execute(**inputs)
        except Exception as told:
            text = str(told)
            traceback.format_exc().encode()
            assert "\n" not in text and text.strip() and "Traceback" not in text, text
            return type(told), text
        raise AssertionError("nothing was raised")

    assert said(ValueError(f"no file {name}")) == (ValueError, "no file mod\\udce9.safetensors")
    assert said(RuntimeError("two\nlines"))[1] == "two lines"
    kind, text = said(OSError(errno.ENOSPC, "No space left on device", "/a/b/file"))
    assert kind is OSError and "/a/b is full" in text and "free" in text
    assert "is full" in said(OSError("[Errno 28] No space left on device: '/a/b/file'"))[1]
    long = "x" * 300
    kind, text = said(OSError(errno.ENAMETOOLONG, "File name too long", f"/a/{long}"), run_name=long)
    assert text.startswith("run_name") and "too long" in text and len(text) < 200
    for code in (errno.EROFS, errno.EACCES, errno.EEXIST):
        assert said(OSError(code, "no", "/a/b"), folder="/a")[1].startswith("folder is '/a'")
    assert said(ValueError("embedded null byte"), folder="a\0b")[1].startswith("folder is 'a\\x00b'")
    encoding = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    assert said(encoding, folder="\ud800")[1].startswith("folder is '\\ud800'")
    assert "damaged" in said(KeyError("samples"))[1]
    assert said(RuntimeError("Traceback (most recent call last)\n  x\nValueError: no\n"))[1] == "ValueError: no"
    assert said(AssertionError())[1]

    class Shown(io.ComfyNode):
        @classmethod
        def execute(cls) -> Any:
            return io.NodeOutput(1, ui={"text": (name,)})

        @classmethod
        def validate_inputs(cls, run_name: str | None = None) -> Any:
            return name

    import inspect

    shown = words.guarded(Shown)
    assert shown.execute().ui == {"text": ("mod\\udce9.safetensors",)}
    assert shown.validate_inputs() == "mod\\udce9.safetensors"
    assert "run_name" in inspect.getfullargspec(shown.validate_inputs).args


def check_preview_settings_are_numbers_that_can_be_sampled() -> None:
    import dataclasses
    import math

    from pack.nodes import handles

    good = handles.PreviewSettings(prompts=("a",), width=64, height=64, sampler="euler", scheduler="simple",
                                   sampling_steps=1, guidance=1, cfg=1.0, preview_seed=0, every_n_steps=0)
    for name, values in {"guidance": (math.nan, math.inf, -1, None), "cfg": (math.nan, -math.inf, "2"),
                         "width": (0, -16, 8208, 100, 64.0), "height": (0, 8, True), "sampling_steps": (0, -1),
                         "every_n_steps": (-1, 0.5), "preview_seed": (-1,), "prompts": ((),)}.items():
        for value in values:
            assert name in refused(lambda name=name, value=value: dataclasses.replace(good, **{name: value}))


def check_export_names_that_do_not_do_are_told() -> None:
    import os
    import tempfile

    import folder_paths
    from pack.nodes import bridge

    with tempfile.TemporaryDirectory() as folder:
        root = os.path.realpath(os.path.join(folder, "diffusion_models"))
        os.mkdir(root)
        before = folder_paths.folder_names_and_paths["diffusion_models"]
        folder_paths.folder_names_and_paths["diffusion_models"] = ([root], before[1])
        try:
            open(os.path.join(root, "file"), "w").close()
            os.mkdir(os.path.join(root, "taken.safetensors"))
            for name in ("x" * 300, "a\0b", "a\ud800", "file/in", "CON", "sub/nul.safetensors", "lpt1", "taken", "a/",
                         "", "..", "../out", "x" * 150 + "/" + "\u00e9" * 150, "/".join("y" * 190 for _ in range(40))):
                line = refused(lambda name=name: bridge.export_path(name))
                assert line.startswith("filename is ") and len(line) < 600, line
            assert str(bridge.export_path("sub/new")) == os.path.join(root, "sub", "new.safetensors")
            assert str(bridge.export_path("console.SAFETENSORS")) == os.path.join(root, "console.safetensors")
            assert bridge.export_path("x" * 100 + "_000500").name == "x" * 100 + "_000500.safetensors"
        finally:
            folder_paths.folder_names_and_paths["diffusion_models"] = before


def check_scans_are_kept_until_a_file_changes() -> None:
    import os
    import tempfile

    from pack.nodes import scans
    from pack.trainer.config import DatasetConfig
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        for name in "ab":
            Image.new("RGB", (64, 64)).save(f"{folder}/{name}.png")
        config, calls = DatasetConfig(folder=folder, resolution=64, bucket_step=16), []

        def look(other: Any = config) -> Any:
            return scans.look(other, lambda done, found: calls.append(done))

        first = look()
        assert calls == [1, 2] and look() is first and calls == [1, 2]
        assert look(DatasetConfig(folder=folder, resolution=128, bucket_step=16)) is not first
        with open(f"{folder}/a.txt", "w") as f:
            f.write("new")
        assert look() is not first and look().samples[0].caption == "new"
        os.remove(f"{folder}/a.txt")
        scans.MOST_SAMPLES = 3
        look()
        assert len(scans._kept) == 1
    for text in (folder, ""):
        assert "does not exist" in refused(lambda text=text: look(DatasetConfig(folder=text or folder)))
