"""Bugs put back on purpose: one change of the source each, and the tests that must fail for it."""

from dataclasses import dataclass

CORE = "services/scheduler/core/"
SIM = "services/scheduler/sim/"


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `path`; `tests` is the selection, at most 30 s, that kills it."""

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "reserve-without-inflight",
        CORE + "planner.py",
        "end = table.confirmed_kv[rows] + table.inflight_q[rows] + geometry.decode_width",
        "end = table.confirmed_kv[rows] + geometry.decode_width",
        "tests/core/test_steps.py tests/core/test_speculation.py",
    ),
    Mutant(
        "publish-at-H",
        CORE + "results.py",
        "kept = alive & (reached == position) & (position <= confirmed)",
        "kept = alive",
        "tests/core/test_speculation.py tests/core/test_endings.py",
    ),
    Mutant(
        "free-on-tokens-ready",
        CORE + "steps.py",
        "self._advance(result.rank, result.gpu_done)",
        "self._advance(result.rank, result.step_id)",
        "tests/core/test_leases.py",
    ),
    Mutant(
        "free-on-submit",
        CORE + "residency.py",
        "fence = int(table.producer[index])\n        request.ids",
        "fence = 0\n        request.ids",
        "tests/core/test_leases.py",
    ),
    Mutant(
        "skip-epoch-on-abort",
        CORE + "results.py",
        "alive = self._table.gen[rows.index] == rows.gen\n        self._check(",
        "alive = np.ones(len(rows.index), np.bool_)\n        self._check(",
        "tests/core/test_endings.py",
    ),
    Mutant(
        "skip-epoch-on-reset",
        CORE + "group.py",
        "        self.engine_epoch += 1\n",
        "",
        "tests/core/test_recovery.py",
    ),
    Mutant(
        "prune-window-on-H",
        CORE + "residency.py",
        "first = (table.confirmed_kv[indices] - self.geometry.window) // size",
        "first = (table.confirmed_kv[indices] + table.inflight_q[indices]"
        " - self.geometry.window) // size",
        "tests/core/test_steps.py tests/core/test_leases.py",
    ),
    Mutant(
        "window-pool-one-short",
        CORE + "residency.py",
        "lacks = [need - have[rows] for have in columns]",
        "lacks = [need - table.num_global[rows], need - 1 - table.window_end[rows]]",
        "tests/core/test_steps.py",
    ),
    Mutant(
        "rederive-row-kind",
        CORE + "results.py",
        "unlike = ~rows.is_prefill & (gained != counts) & ~failed",
        "unlike = (self._table.phase[rows.index] == Phase.DECODE) & (gained != counts) & ~failed",
        "tests/core/test_steps.py",
    ),
    Mutant(
        "rewrite-staging-early",
        SIM + "executor.py",
        'self._ring: list[bytes] = [b""] * (depth + 1)',
        'self._ring: list[bytes] = [b""]',
        "tests/sim/test_world.py",
    ),
    Mutant(
        "remap-by-position",
        CORE + "packer.py",
        "np.where(is_prefill, 0, table.producer[index])",
        "np.where(is_prefill, 0, np.roll(table.producer[index], 1))",
        "tests/core/test_steps.py tests/property/test_scheduler.py",
    ),
    Mutant(
        "patch-one-rank-size",
        CORE + "packer.py",
        "descriptor=descriptor,\n                rows=",
        "descriptor=replace(descriptor, padded_tokens=descriptor.padded_tokens + rank),\n"
        "                rows=",
        "tests/sim/test_world.py -k ranks",
    ),
    Mutant(
        "skip-dummy",
        CORE + "scheduler.py",
        "            for rank, step in enumerate(steps):\n",
        "            for rank, step in enumerate(steps):\n"
        "                if step.rows[20] == 3:\n                    continue\n",
        "tests/sim/test_world.py -k ranks",
    ),
    Mutant(
        "drop-dummy-lease",
        CORE + "packer.py",
        "DUMMY_SLOT = 0xFFFFFFFF",
        "DUMMY_SLOT = 0",
        "tests/sim/test_world.py -k ranks",
    ),
    Mutant(
        "double-release",
        CORE + "residency.py",
        "        memory.release_slot(slot, fence)\n        if not table",
        "        self._release(memory, Pool.STATE, [int(table.state[index])], fence)\n"
        "        memory.release_slot(slot, fence)\n        if not table",
        "tests/core/test_steps.py",
    ),
    Mutant(
        "infer-released-length",
        CORE + "residency.py",
        "held = table.global_blocks[index, : table.num_global[index]]",
        "held = table.global_blocks[index, : table.confirmed_kv[index] // 8]",
        "tests/core/test_steps.py",
    ),
    Mutant(
        "stop-after-length",
        CORE + "results.py",
        "            if token in request.stop_ids and length > first_stop:\n"
        "                return count, FinishReason.STOP\n"
        "            if length >= request.max_len:\n"
        "                return count, FinishReason.LENGTH\n",
        "            if length >= request.max_len:\n"
        "                return count, FinishReason.LENGTH\n"
        "            if token in request.stop_ids and length > first_stop:\n"
        "                return count, FinishReason.STOP\n",
        "tests/core/test_endings.py",
    ),
    Mutant(
        "zero-counter-on-preempt",
        CORE + "watermark.py",
        "                table.leaving[victim.slot] = True\n",
        "                table.leaving[victim.slot] = True\n"
        "                table.inflight_q[victim.slot] = 0\n",
        "tests/core/test_preemption.py",
    ),
    Mutant(
        "preempt-more-than-shortfall",
        CORE + "policy.py",
        "        if need <= 0:\n            break\n",
        "",
        "tests/core/test_preemption.py",
    ),
    Mutant(
        "preempt-in-flight",
        CORE + "watermark.py",
        "if table.inflight_rows[victim.slot] == 0:",
        "if table.inflight_rows[victim.slot] >= 0:",
        "tests/core/test_preemption.py --timeout=15",
    ),
    Mutant(
        "attach-skips-one",
        CORE + "outbox.py",
        "output = ids[request.prompt_len + from_pos :]",
        "output = ids[request.prompt_len + from_pos + 1 :]",
        "tests/core/test_recovery.py",
    ),
    Mutant(
        "resume-below-grid",
        CORE + "policy.py",
        "    align = geometry.chunk_align\n    ends",
        "    align = geometry.block_size\n    ends",
        "tests/core/test_prefix_cache.py",
    ),
    Mutant(
        "hit-covers-last-token",
        CORE + "admission.py",
        "len(request.ids) - 1\n",
        "len(request.ids)\n",
        "tests/core/test_prefix_cache.py",
    ),
    Mutant(
        "hit-without-pin",
        CORE + "residency.py",
        "                memory.pools[pool].share(block)\n",
        "                pass\n",
        "tests/core/test_prefix_cache.py",
    ),
    Mutant(
        "seed-redrawn",
        CORE + "slot_updates.py",
        "seed=generate.seed,",
        "seed=generate.seed + request.epoch,",
        "tests/core/test_preemption.py",
    ),
    Mutant(
        "capacity-from-now",
        CORE + "speculation.py",
        "histogram = self._confidences[0]",
        "histogram = self._confidences[-1]",
        "tests/core/test_speculation.py",
    ),
    Mutant(
        "ack-before-send",
        "services/tokenizer/request.py",
        "while self.acks and self.acks[0][0] <= taken:",
        "while self.acks:",
        "tests/services/test_tokenizer_core.py -k acks",
    ),
    Mutant(
        "unmasked-on-miss",
        SIM + "device.py",
        "            self.missed_masks += 1\n            return []\n",
        "            self.missed_masks += 1\n            return None\n",
        "tests/sim/test_masks.py",
    ),
    Mutant(
        "mask-by-offset",
        SIM + "masks.py",
        "masks = self._masks.get(tag)\n",
        "masks = next(iter(self._masks.values()), None)  # whichever comes next\n",
        "tests/sim/test_masks.py",
    ),
    Mutant(
        "count-reasoning-before-cut",
        "services/tokenizer/events.py",
        "                self.stopped = True\n                return count, events\n",
        "                self.stopped = True\n",
        "tests/services/test_usage_counts.py tests/services/test_tokenizer_text.py",
    ),
    Mutant(
        "abort-by-client-id",
        "services/gateway/arrival.py",
        "        rid=rid,\n        seed=",
        '        rid=(headers.get(b"x-request-id") or rid).ljust(16)[:16],\n        seed=',
        "tests/services/test_client_labels.py",
    ),
    Mutant(
        "wait-for-a-prefix-for-ever",
        CORE + "residency.py",
        "        self._expect(request, rank, -1)\n",
        "",
        "tests/core/test_prefix_cache.py",
    ),
    Mutant(
        "admit-beside-a-suspect",
        CORE + "admission.py",
        "            return len(here) > 0\n",
        "            return False\n",
        "tests/core/test_recovery.py",
    ),
]
