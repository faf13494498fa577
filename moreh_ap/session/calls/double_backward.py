"""A backward with `create_graph=True` through a call: the gradients are the result of a further call.

Decides the inputs of that further call and the use of its result. Must not know how workers compute it: see
[Note: a call like others] in `parallelizer/call/gradient_pass.py`.

[Note: the node of the further call]
In the controller's graph the further call is one node too. Its inputs are the output gradients and the inputs of the
differentiated call. A backward that reaches it sends one `Backward`, continues to the nodes that computed these inputs,
and is itself differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.messages.calls import Differentiate
from moreh_ap.session.calls import autograd_api
from moreh_ap.session.calls.remote_call import Call, send_as_node
from moreh_ap.session.models.parameter_gradients import refuse_calls_of_before, separate_gradients
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.signatures import Structure
from moreh_ap.session.outbox import Posted


def differentiate(call: Call, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of `inputs` of a call from the gradients of its outputs, with a graph.

    Gradients of parameters and of watched outputs are passed to those who requested them.

    Raises:
        UnsupportedError: Parameters would accumulate gradients with a graph, or the plan does not allow it.
    """
    model, apart = call.model, separate_gradients.get()
    refuse_calls_of_before(model)
    if apart is None and model.has_trainable_parameters():
        raise autograd_api.graph_of_kept_gradients()
    _require_full_model_on_each_device(model)
    model.session.has_differentiated = True
    if isinstance(call, GradientCall):
        call.refuse_partial_gradients()
    watched = call.watched()
    parameters = () if apart is None else tuple(apart.asked(model))
    if not (inputs or watched or parameters):
        return ()
    further = GradientCall(call, tuple(gradient is not None for gradient in gradients), watched, parameters)
    given = [gradient for gradient in gradients if gradient is not None]
    found, _ = send_as_node(further, [*given, *inputs])
    of_watched = zip(watched, found[len(inputs) :])
    call.tell_watchers({index: gradient for index, gradient in of_watched if gradient is not None})
    if apart is not None:
        apart.add(model, dict(zip(parameters, found[len(inputs) + len(watched) :])))
    return found[: len(inputs)]


class GradientCall(Call):
    """The gradients of another call, as a call. See [Note: the node of the further call].

    Args:
        of: The other call.
        reached: For each tensor among its outputs whether its gradient is given.
        watched: Leaves of its result whose gradients are wanted.
        parameters: Names of parameters whose gradients are wanted.
    """

    def __init__(
        self, of: Call, reached: tuple[bool, ...], watched: tuple[int, ...], parameters: tuple[str, ...]
    ) -> None:
        super().__init__(of.model, -1)
        self._of_kept = of.still_kept()
        self._of, self._reached, self._of_watched, self._of_parameters = of, reached, watched, parameters

    def send(self, tensors: list[Tensor], grad: bool) -> Structure:
        of, session = self._of, self.model.session
        if of.reply is not None:
            of.reply.require()
        given = iter(tensors)
        gradients = [next(given) if is_given else None for is_given in self._reached]
        wants_grad = tuple(gradient is not None and gradient.requires_grad for gradient in gradients)
        asked = (self._reached, wants_grad, self._of_watched, self._of_parameters)
        self.kind = (of.kind, asked)
        self.backward_kind = (of.backward_kind, asked)
        encoded, training = of.encode_gradients(gradients), of.changed_training()
        self.reply = session.outbox.submit(
            Differentiate(self.id, of.id, encoded, wants_grad, self._of_watched, self._of_parameters, training)
        )
        return self.await_structure(self.model.signatures.structures.get(self.kind), grad=grad)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> Posted:
        self.refuse_partial_gradients()
        return super().backward(gradients)

    def watched(self) -> tuple[int, ...]:
        """The watched leaves; the leaves of the other call follow the leaves of this call."""
        return (*super().watched(), *(self._num_own + index for index in self._of.watched()))

    def tell_watchers(self, found: dict[int, Tensor]) -> None:
        own = self._num_own
        super().tell_watchers({index: gradient for index, gradient in found.items() if index < own})
        self._of.tell_watchers({index - own: gradient for index, gradient in found.items() if index >= own})

    @property
    def _num_own(self) -> int:
        assert self.structure is not None
        return len(self.structure.leaves)

    def refuse_partial_gradients(self) -> None:
        """Raises for watchers of the other call, whose outputs get their gradients in two summands.

        Raises:
            UnsupportedError: A watcher needs the full gradient at once.
        """
        of: Call = self
        while isinstance(of, GradientCall):
            of = of._of
            if of.watchers is not None and of.watchers.want_full_gradients():
                raise UnsupportedError(
                    "A backward through gradients with a graph (create_graph=True) reaches what a hook waits for: the "
                    "gradient of an output of a model, or of a module inside. It comes in parts.",
                    allowed="Tensor.retain_grad, and torch.autograd.grad by the output.",
                    fix="handle.remove()  # of the hook, before the backward",
                )


def _require_full_model_on_each_device(model: RemoteModel) -> None:
    """Requires that every device holds the full model and a call's activations, which second derivatives need.

    Raises:
        UnsupportedError: The plan is another one and cannot be changed now.
    """
    plan, lay_out_again = model.plan, model.session.lay_out_again
    whole = plan.whole_model()
    if plan == whole:
        return
    reason = f'plan="{plan}" does not allow create_graph=True, which the script asks for'
    if lay_out_again is None or not lay_out_again(model, whole, reason):
        raise UnsupportedError(
            f"create_graph=True under plan={str(plan)!r}: gradients of gradients are computed where each device has "
            "the whole model and what a call computed, in float32.",
            allowed="A plan with nothing but replicate.",
            fix=f'torch.moreh.option.enable_advanced_parallelization(plan="{whole}")',
        )
