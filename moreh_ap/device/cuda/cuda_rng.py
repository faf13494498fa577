"""The accelerator's random stream for a script: seeds, and a state that can be saved and restored.

Every function here replaces the function of `torch.cuda.random` with the same name; `torch.cuda` has them too, and
`torch.random.fork_rng` and checkpoints of other libraries use them there. A state has the form of a CUDA generator's:
16 bytes, the seed and the offset; for CPU workers that of the process's generator follows. Decides the form of a state;
must not know its content, nor the operations that draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.transfers import require_accelerator
from moreh_ap.device.worker_backend import WorkerBackend
from moreh_ap.patching import Patches


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Have seeds and states of the CUDA random stream be those of the accelerator."""
    group = patches.group("Random numbers on the accelerator are drawn by the workers, from one stream.")
    stream = RandomState(backend)
    functions = {name: getattr(stream, name) for name in vars(RandomState) if not name.startswith("_")}
    group.replace_all(torch.cuda, functions)
    group.replace_all(torch.cuda.random, functions)


class RandomState:
    """The functions that replace those of `torch.cuda.random`: its public methods, by their names."""

    def __init__(self, backend: WorkerBackend) -> None:
        self._backend = backend

    def manual_seed(self, seed: int) -> None:
        """Restart the accelerator's random stream; `torch.manual_seed` calls this too."""
        self._backend.generator.manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """The same as `manual_seed`: there is one device."""
        self.manual_seed(seed)

    def seed(self) -> None:
        """Restart the stream at a random seed."""
        self.manual_seed(torch.Generator().seed())

    def seed_all(self) -> None:
        """The same as `seed`: there is one device."""
        self.seed()

    def initial_seed(self) -> int:
        """The seed of the stream."""
        return self._backend.generator.initial_seed()

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        """Where the stream is: bytes on the CPU, for `set_rng_state`."""
        require_accelerator(device)
        return torch.frombuffer(bytearray(self._backend.generator.state()), dtype=torch.uint8)

    def get_rng_state_all(self) -> list[Tensor]:
        """The states of all devices, of which a script sees one."""
        return [self.get_rng_state()]

    def set_rng_state(self, new_state: Tensor, device: Any = "cuda") -> None:
        """Go on where the stream was.

        Raises:
            TypeError: `new_state` is no tensor of bytes.
            RuntimeError: It is not a state of the accelerator; both as PyTorch raises them.
        """
        require_accelerator(device)
        if not isinstance(new_state, Tensor) or new_state.dtype != torch.uint8:
            raise TypeError(
                f"RNG state must be a torch.ByteTensor, but got: {getattr(new_state, 'dtype', new_state)!r}"
            )
        size = len(self._backend.generator.state())
        if new_state.numel() != size:
            raise RuntimeError(f"RNG state is wrong size: {new_state.numel()} bytes, but the accelerator's has {size}")
        self._backend.generator.set_state(bytes(new_state.flatten().tolist()))

    def set_rng_state_all(self, new_states: Iterable[Tensor]) -> None:
        """`set_rng_state` for every device.

        Raises:
            RuntimeError: There are states of more devices than one.
        """
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)
