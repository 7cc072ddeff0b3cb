"""The update rules. NAdam's switches make Adam, AdamW, NAdam and NAdamW of it."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..trainer.config import STATE_FORMATS, WEIGHT_PRECISIONS, OptimizerConfig
from . import handles


def _rate(default: str) -> Any:
    # Text, since float widgets round: 3.5e-6 would become 0.00.
    return io.String.Input("learning_rate", default=default,
                           tooltip="How far a step may move a weight, as a plain number such as 3.5e-6. Lower it "
                                   "when the loss jumps or pictures fall apart; raise it when previews hardly "
                                   "change. 0 changes nothing.")


def _decay() -> Any:
    return io.Float.Input("weight_decay", default=0.0, min=0.0, max=10000.0, step=0.001,
                          tooltip="Pull of the weights towards zero, times the learning rate at each step. Leave 0: a "
                          "fine-tune should stay near the model it started from.")


def _beta(name: str, default: float, what: str) -> Any:
    return io.Float.Input(name, default=default, min=0.0, max=0.9999, step=0.0001,
                          tooltip=f"Share of {what} kept at each step, 0 to 1. Change it only to try another "
                                  "published recipe.")


def _storage() -> list[Any]:
    return [
        io.String.Input("eps", default="1e-8",
                        tooltip="Small number added before dividing, such as 1e-8. Raise it (1e-6) if the loss "
                                "becomes NaN."),
        io.Combo.Input("state_format", options=list(STATE_FORMATS), default=OptimizerConfig.state_format,
                       tooltip="How the optimizer's memory is kept in RAM. Bytes per number: log16 2, f24 3, f32 4 "
                               "(exact), u16pow 2 (the prototype's), bf16 2, int8 1. Leave log16; choose int8 when the "
                               "plan says that RAM is short."),
        io.Combo.Input("weight_precision", options=list(WEIGHT_PRECISIONS), default=OptimizerConfig.weight_precision,
                       tooltip="split: bf16 weights on the GPU, and in RAM 2 bytes that make each an exact float32. "
                               "stochastic: bf16 rounded at random, saves those 2 bytes: choose it when RAM is short. "
                               "nearest: plain bf16, which loses small steps. f32: float32, for tiny models."),
    ]


class FluxFFTOptimizerNAdam(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTOptimizerNAdam",
            display_name="Optimizer: NAdam / AdamW",
            category=handles.CATEGORY,
            description="Adam, AdamW, NAdam or NAdamW with its memory in RAM. The settings shown are the method "
                        "author's.",
            inputs=[
                _rate("3.5e-6"),
                io.Boolean.Input("nesterov", default=True,
                                 tooltip="On: NAdam, which looks one step ahead. Off: plain Adam, to repeat an Adam "
                                         "recipe."),
                io.Boolean.Input("cautious", default=True,
                                 tooltip="Leave out the parts of a step that point against the newest gradient. "
                                 "Turn it off to repeat a recipe of another program."),
                _decay(),
                io.Boolean.Input("decoupled_decay", default=True,
                                 tooltip="How weight_decay acts. On: on the weights themselves (AdamW, NAdamW). "
                                         "Off: through the gradient (Adam, NAdam). It matters only where "
                                         "weight_decay is above 0."),
                _beta("beta1", 0.9, "the running mean of gradients"),
                _beta("beta2", 0.999, "the running mean of squared gradients"),
                *_storage(),
            ],
            outputs=[handles.Optimizer.Output("optimizer", display_name="optimizer")],
        )

    @classmethod
    def validate_inputs(cls, learning_rate=None):
        return handles.check(_rated, learning_rate)

    @classmethod
    def execute(cls, learning_rate, nesterov, cautious, weight_decay, decoupled_decay, beta1, beta2, eps, state_format,
                weight_precision) -> io.NodeOutput:
        return io.NodeOutput(OptimizerConfig(
            kind="nadam", lr=handles.number("learning_rate", learning_rate), betas=(beta1, beta2),
            eps=handles.number("eps", eps), weight_decay=weight_decay, nesterov=nesterov,
            decoupled_decay=decoupled_decay, cautious=cautious, state_format=state_format,
            weight_precision=weight_precision))


class FluxFFTOptimizerAdan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTOptimizerAdan",
            display_name="Optimizer: Adan",
            category=handles.CATEGORY,
            description="Adan with its memory in RAM: three running means and the gradient before. Needs more RAM "
                        "than NAdam and about ten times its learning rate. The settings shown are the method "
                        "author's.",
            inputs=[
                _rate("3.3e-5"),
                _decay(),
                io.Boolean.Input("no_prox", default=False,
                                 tooltip="Apply weight_decay before the step rather than after it. "
                                 "It matters only where weight_decay is above 0."),
                _beta("beta1", 0.98, "the running mean of gradients"),
                _beta("beta2", 0.92, "the running mean of gradient changes"),
                _beta("beta3", 0.99, "the running mean of squares"),
                *_storage(),
            ],
            outputs=[handles.Optimizer.Output("optimizer", display_name="optimizer")],
        )

    @classmethod
    def validate_inputs(cls, learning_rate=None):
        return handles.check(_rated, learning_rate)

    @classmethod
    def execute(cls, learning_rate, weight_decay, no_prox, beta1, beta2, beta3, eps, state_format,
                weight_precision) -> io.NodeOutput:
        return io.NodeOutput(OptimizerConfig(
            kind="adan", lr=handles.number("learning_rate", learning_rate), betas=(beta1, beta2, beta3),
            eps=handles.number("eps", eps), weight_decay=weight_decay, no_prox=no_prox, state_format=state_format,
            weight_precision=weight_precision))


def _rated(learning_rate: str | None) -> None:
    """Raise ``ValueError`` for a rate typed in the widget; a linked one is None here and is checked when it runs."""
    if learning_rate is not None:
        OptimizerConfig(lr=handles.number("learning_rate", learning_rate))
