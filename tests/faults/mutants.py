"""Planted bugs, as data: a text of the library, what is put in its place, and the test that is there to notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str  # a file, and which tests of it


CHANNEL_MUTANTS = [
    Mutant(
        "a writer overwrites without saying so first",
        "ipcsync/turns.py",
        "                words[Head.CLAIMED] = item  # announce, then look who is there",
        "                pass",
        "tests/conformance/test_channel_readers.py -k late_reader_starts",
    ),
    Mutant(
        "a joiner is promised what was given up already",
        "ipcsync/ring.py",
        "    first = max(cursor, words[Head.CLAIMED] + 1)",
        "    first = cursor",
        "tests/conformance/test_channel_readers.py -k late_reader_starts",
    ),
    Mutant(
        "the writer's stream does not wait for the readers' streams",
        "ipcsync/turns.py",
        "                elif words[r.done + b] < item:",
        "                elif False:",
        "tests/conformance/test_channel_streams.py -k host_does_not_wait",
    ),
    Mutant(
        "a reader that gave up holds the writer for good",
        "ipcsync/turns.py",
        " or words[r.until] < item",
        "",
        "tests/unit/test_turns.py -k stopped_holds_nobody",
    ),
    Mutant(
        "condemned items hold the next writer for good",
        "ipcsync/ring.py",
        "            words[control.buffers[b] + Buffer.VOID] = item",
        "            pass",
        "tests/unit/test_groups.py -k condemned_item",
    ),
    Mutant(
        "what a stopped reader holds is overwritten",
        "ipcsync/turns.py",
        "                        words[at + Reader.STATE] == Reader.RETIRED,",
        "                        words[at + Reader.STATE] == 77,",
        "tests/unit/test_turns.py -k retired",
    ),
    Mutant(
        "a word that a stream still waits on is taken back for its next owner",
        "ipcsync/ring.py",
        "        words[at + control.done + b] = first - 1",
        "        words[at + control.done + b] = 0",
        "tests/unit/test_turns.py -k left_readers_word",
    ),
    Mutant(
        "a dead writer's last item hides a reader whose device is still at the one before",
        "ipcsync/turns.py",
        "            if void and words[r.released + b] < item and words[r.done + b] < before:",
        "            if False:",
        "tests/unit/test_turns.py -k dead_writers_last_item",
    ),
    Mutant(
        "who waits for room does not see that a reader stopped",
        "ipcsync/turns.py",
        "            if words[r.until] != FOREVER:\n                return None",
        "            pass",
        "tests/unit/test_turns.py -k whatever_frees",
    ),
    Mutant(
        "who waits for room does not see that a slot was put back",
        "ipcsync/turns.py",
        "        self._full = None\n        self.order.insert(0, b)",
        "        self.order.insert(0, b)",
        "tests/unit/test_turns.py -k put_back_is_had_again",
    ),
    Mutant(
        "a latest reader does not look whether its item was dropped",
        "ipcsync/turns.py",
        "        if words[Head.DROPPED] >= number:",
        "        if False:",
        "tests/unit/test_turns.py -k dropped_under",
    ),
    Mutant(
        "a group's item goes to two members",
        "ipcsync/groups.py",
        "            words[self._line + Group.CURSOR] = number + 1",
        "            pass",
        "tests/unit/test_groups.py -k one_member",
    ),
    Mutant(
        "what a dead member held is lost",
        "ipcsync/ring.py",
        "    given_again = group >= 0 and words[Head.REDELIVER] and control.living(group)",
        "    given_again = False",
        "tests/unit/test_groups.py -k dead_member_held",
    ),
    Mutant(
        "a dead member's item is given again and again",
        "ipcsync/groups.py",
        "                words[released] = item",
        "                pass",
        "tests/unit/test_groups.py -k next_one_dies",
    ),
    Mutant(
        "the cell of a dead member is given away with what it held",
        "ipcsync/ring.py",
        "    if group >= 0 and words[Head.REDELIVER] and control.holding(cell):",
        "    if False:",
        "tests/unit/test_groups.py -k dead_member_held",
    ),
    Mutant(
        "a turn ends without a look at the verdict",
        "ipcsync/channel_reader.py",
        "        if number and self._epochs.bad <= number:",
        "        if False:",
        "tests/conformance/test_channel_streams.py -k never_finished",
    ),
    Mutant(
        "a round that was complete is never said to be issued",
        "ipcsync/condemn.py",
        "    if words[at + Cell.ISSUED] < verdict - 1:",
        "    if False:",
        "tests/faults/test_channel_faults.py -k hear_of_it",
    ),
    Mutant(
        "an exception publishes what was half written",
        "ipcsync/slot.py",
        "        if kind is not None:\n            self._writer._put_back(self)",
        "        if False:\n            self._writer._put_back(self)",
        "tests/conformance/test_channels.py -k exception_or_a_discard",
    ),
    Mutant(
        "an array is written under its readers",
        "ipcsync/shared_array.py",
        "                    if words[lane + Reader.RELEASED] < begun:",
        "                    if False:",
        "tests/conformance/test_arrays.py -k while_a_version_is_held",
    ),
    Mutant(
        "reads on several streams are counted as if they ended in order",
        "ipcsync/lanes.py",
        "        return min(free, key=cost)",
        "        self._streams[0] = key\n        return 0",
        "tests/conformance/test_arrays.py -k end_in_any_order",
    ),
    Mutant(
        "an exception in write leaves a torn array behind",
        "ipcsync/shared_array.py",
        "                self.session.condemn_own(self._timeline, error)",
        "                pass",
        "tests/conformance/test_arrays.py -k exception_in_write",
    ),
]

RACES = "tests/unit/test_timeline_races.py"
CONDEMN = "tests/unit/test_condemn.py"
EVENTS = "tests/conformance/test_shared_events.py"

EVENT_MUTANTS = [
    Mutant(
        "the dead are released before the chain is condemned",
        "ipcsync/condemn.py",
        '    failpoint("condemn.verdict")\n',
        '    failpoint("condemn.verdict")\n    for cell in dead:\n        release_word(ledger, cell)\n',
        f"{CONDEMN} -k before_every_verdict",
    ),
    Mutant(
        "the verdict goes one link far",
        "ipcsync/condemn.py",
        '    failpoint("condemn.verdict")\n    while frontier:',
        '    failpoint("condemn.verdict")\n    for _ in [0]:',
        f"{CONDEMN} -k to_its_end",
    ),
    Mutant(
        "a condemned recorder releases its waiters itself, before the chain is condemned",
        "ipcsync/backends/host.py",
        "        words[index] = value\n",
        "        words[index] = FOREVER if verdict is not None and words[verdict] <= value else value\n",
        f"{RACES} -k releases_nobody",
    ),
    Mutant(
        "the words of the living are released as well",
        "ipcsync/condemn.py",
        "    if release:\n        for cell in dead:",
        "    if release:\n        for cell in {*dead, *report.verdicts}:",
        f"{CONDEMN} -k to_its_end",
    ),
    Mutant(
        "a second verdict moves the first",
        "ipcsync/condemn.py",
        "    if words[at + Cell.VERDICT] != FOREVER:\n        return False\n",
        "",
        f"{CONDEMN} -k second_death",
    ),
    Mutant(
        "no fence between the verdict and the look for waits",
        "ipcsync/condemn.py",
        '    failpoint("condemn.verdict")\n    while frontier:\n        linux.membarrier()\n',
        '    failpoint("condemn.verdict")\n    while frontier:\n',
        f"{RACES} -k fence",
    ),
    Mutant(
        "the verdict is read before the word",
        "ipcsync/timeline.py",
        "        self.check(round)  # the word first, the verdict after",
        "",
        f"{RACES} -k read_before_its_verdict",
    ),
    Mutant(
        "what is complete is judged by an old verdict",
        "ipcsync/ledger.py",
        "        word = self.words[at + Cell.WORD]\n        return min(word, self.words[at + Cell.VERDICT] - 1)",
        "        verdict = self.words[at + Cell.VERDICT]\n        return min(self.words[at + Cell.WORD], verdict - 1)",
        f"{RACES} -k read_before_its_verdict",
    ),
    Mutant(
        "a wait is announced to nobody",
        "ipcsync/timeline.py",
        "        if not self.session.waits.announce(self.cell, round):\n            return False",
        "        if False:\n            return False",
        f"{EVENTS} -k chain_is_condemned",
    ),
    Mutant(
        "a wait is enqueued without another look at the verdict",
        "ipcsync/timeline.py",
        """            failpoints.hit("wait.announced")
        self.check(round)
""",
        """            failpoints.hit("wait.announced")
""",
        f"{RACES} -k enqueues_nothing",
    ),
    Mutant(
        "a record is meant by nobody",
        "ipcsync/timeline.py",
        "            words[self._intent] = round  # announce ...",
        "            words[self._intent] = before",
        f"{RACES} -k meant_as",
    ),
    Mutant(
        "a record does not look for a verdict",
        "ipcsync/timeline.py",
        "            if words[self._verdict] <= round or words[self._owned] != self.incarnation:  # ... check ...",
        "            if words[self._owned] != self.incarnation:",
        f"{RACES} -k announces_its_intent",
    ),
    Mutant(
        "a record goes into another incarnation's cell",
        "ipcsync/timeline.py",
        "            if words[self._verdict] <= round or words[self._owned] != self.incarnation:  # ... check ...",
        "            if words[self._verdict] <= round:",
        f"{RACES} -k is_not_recorded",
    ),
    Mutant(
        "another incarnation's rounds are taken for one's own",
        "ipcsync/timeline.py",
        "        if words[self._verdict] <= round or words[self._owned] != self.incarnation:\n            self.refuse",
        "        if words[self._verdict] <= round:\n            self.refuse",
        f"{RACES} -k is_not_waited_for",
    ),
    Mutant(
        "who waited for the dead records on as if nothing was",
        "ipcsync/timeline.py",
        "            if words[session._taint] != self._told:",
        "            if False:",
        f"{RACES} -k taint_between",
    ),
    Mutant(
        "the pen is let go with rounds under way",
        "ipcsync/timeline.py",
        "                self.wait_host(self.issued, deadline)\n                give_back()",
        "                give_back()",
        f"{EVENTS} -k hand_to_hand",
    ),
    Mutant(
        "the broker takes the pen back with rounds under way",
        "broker/ipcsync_broker/pens.py",
        "        if not state.facts.drained(thing.cell):\n            raise",
        "        if False:\n            raise",
        "tests/unit/test_state.py -k one_recorder",
    ),
    Mutant(
        "a fast stream's round overtakes a slow one's",
        "ipcsync/timeline.py",
        "            if raw is not last and words[self._word] < before and not self._after(raw, last, before, here):",
        "            if False:",
        f"{EVENTS} -k overtake",
    ),
    Mutant(
        "a cell is given away while a stream has yet to look at it",
        "ipcsync/timeline.py",
        "        return self.session.waits.reached(self.cell) and all(",
        "        return True or all(",
        "tests/integration/test_session.py -k cell_is_not_given_away",
    ),
]

MUTANTS = [*CHANNEL_MUTANTS, *EVENT_MUTANTS]
