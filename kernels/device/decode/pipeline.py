"""How the stages of two groups of slots overlap.

A trip of the loop has the shifts, weights and values of a group and the scores of the next one. PE
transposes the first banks of keys while DVE and ACT find the weights, weighs the values as soon as
they are there, so that the next values can be gathered, and then goes on with the scores.
"""

from ...backend import nisa, nl
from .group import DecodeGroup
from .tensors import clear

SCORE_LAG = 1
"""Banks of keys in SBUF ahead of their scores, so that PE does not wait for a copy."""

EARLY_BANKS = 2
"""Banks that ACT brings to SBUF before it has weights to compute."""

DVE_BANKS = 3
"""One bank of so many is brought by DVE, the others by ACT; none if chains share slots, where
maxima and subtraction keep DVE busy."""


class GroupEnd(nl.NKIObject):
    """What follows the weights of a group, in steps between the scores of the next one."""

    def __init__(self, group: DecodeGroup, index: nisa.VirtualRegister, out: nl.NkiTensor) -> None:
        self.group = group
        self.index = index  # of the next group
        self.out = out
        self.done = 0

    def weigh_values(self) -> None:
        """Values times weights; the next values take their place."""
        group, stage = self.group, self.group.stage
        group.weigh_edges()
        for slot in range(group.slots):
            group.weigh_slot(slot)
            stage.take_value_rows(slot, 1)
            stage.gather_values(slot)
        group.sum_weights()
        stage.take_value_rows(group.slots, 1)
        stage.gather_values(group.slots)

    def step(self) -> None:
        """Sums, then results."""
        group, stage = self.group, self.group.stage
        if self.done == 0:
            group.add()
        if self.done == 1:
            group.normalise()
        if self.done == 2:
            for each in stage.result_lists():
                each.take_all()
            group.store(self.out)
            for each in stage.result_lists():
                each.fetch(self.index, 0)
            stage.value_rows.fetch(self.index, 1)
            stage.fetch_chains(self.index, 1)
        self.done = self.done + 1

    def finish(self) -> None:
        """All steps that are left."""
        while self.done < 3:
            self.step()


class GroupScores(nl.NKIObject):
    """Scores of a group, from its keys bank by bank: PE transposes ahead, DVE and ACT copy."""

    def __init__(
        self,
        group: DecodeGroup,
        index: nisa.VirtualRegister | None,  # of the group; None: the first
        prefetch: bool,  # whether there may be a next one
    ) -> None:
        self.group = group
        self.index = index
        self.prefetch = prefetch
        self.banks = group.keys.banks()
        self.turned = 0
        self.copied = 0
        self.gathered = 0

    def turn(self, count: int) -> None:
        """Transpose up to `count` banks."""
        keys = self.group.keys
        while count > 0 and self.turned < self.banks:
            keys.turn_bank(self.turned)
            self.turned = self.turned + 1
            count = count - 1
        self.gather_next()

    def gather_next(self) -> None:
        """Slots whose keys have all been read are gathered anew."""
        keys, stage = self.group.keys, self.group.stage
        banks = self.turned
        if stage.present is not None:
            banks = self.copied
        if self.prefetch and banks > 0:
            while self.gathered < keys.slots_of_banks(banks):
                stage.take_key_rows(self.gathered, 1)
                stage.gather_keys(self.gathered)
                self.gathered = self.gathered + 1

    def copy(self) -> None:
        """Bring a bank to SBUF."""
        group = self.group
        engine = nisa.engine.scalar
        if self.index is None:
            if self.copied % 2 == 0:
                engine = nisa.engine.vector
        elif self.copied % DVE_BANKS == DVE_BANKS - 1 and group.spans == group.slots:
            engine = nisa.engine.vector
        self.copied = self.copied + 1
        self.group.keys.copy_bank(engine)
        self.gather_next()

    def begin(self) -> None:
        """The first banks, while DVE is busy with the shifts of the group before."""
        for _ in range(EARLY_BANKS):
            self.copy()
            self.turn(1)

    def attend(self, end: GroupEnd | None) -> None:
        """All scores, beside the end of the group before."""
        group, stage = self.group, self.group.stage
        if self.prefetch:
            stage.fetch_queries()
            for each in stage.score_lists():
                each.fetch(self.index, 1)
        self.turn(len(group.buffers.transposed) - 1 - len(group.keys.turned))
        if end is not None:
            end.weigh_values()
        for bank in range(self.banks):
            if self.copied < self.banks:
                self.copy()
            if self.copied >= self.banks or len(group.keys.ready) > SCORE_LAG:
                group.score_bank()
            if bank == self.banks // 2 and self.prefetch:
                stage.fetch_key_chains(self.index, 2)
            if end is not None and bank > 0:
                end.step()
            self.turn(1)
        while len(group.keys.ready) > 0:
            group.score_bank()
        if end is not None:
            end.finish()
        if self.prefetch:
            stage.fetch_absent(self.index, 1)
            stage.fetch_key_rows(self.index, 2)


def begin(group: DecodeGroup, zeros: nl.NkiTensor) -> None:
    """Load the first group; staging tiles are cleared, because a gather skips absent rows."""
    stage = group.stage
    engines = [nisa.engine.gpsimd, nisa.engine.vector, nisa.engine.scalar]
    stage.fetch_first_lists()
    for slot in range(group.slots + 1):
        for keys in stage.k_stage[slot]:
            clear(keys, zeros, engines[min(slot, 1 + slot % 2)])
        stage.gather_keys(slot)
    group.buffers.write_constants()
    group.write_constants()
    for slot in range(group.slots + 1):
        clear(stage.v_stage[slot], zeros, engines[1 + slot % 2])
        stage.gather_values(slot)
    group.factors.fetch(stage.chains)
