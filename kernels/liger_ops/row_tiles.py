"""How the kernels that work on whole rows cut (M, D) into tiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class RowTiles:
    """One choice of tiles.

    Attributes:
        forward_block_d, backward_block_d: columns held at once, a power of two. A wider row is
            taken in blocks.
        forward_rows, backward_rows: rows a program holds at once.
        forward_warps, backward_warps: warps a program.
        backward_programs: programs a multiprocessor in the backward; each walks over rows and
            keeps one partial sum of each parameter's gradient.
        backward_two_pass: read each row twice instead of holding it.
    """

    forward_block_d: int
    forward_rows: int
    forward_warps: int
    backward_block_d: int
    backward_rows: int
    backward_warps: int
    backward_programs: int
    backward_two_pass: bool

    @property
    def backward_registers(self) -> int:
        """The most a thread may have for `backward_programs` to fit a multiprocessor at once."""
        return min(65536 // (32 * self.backward_warps * self.backward_programs), 255)


Tiles = TypeVar("Tiles", bound=RowTiles)


def of_width(dim: int, table: Mapping[int, Tiles]) -> Tiles:
    """The entry for rows of `dim` elements of a table by powers of two."""
    return table[min(max(1 << (dim - 1).bit_length(), min(table)), max(table))]
