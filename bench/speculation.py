"""Tokens a second with guessed tokens and without, on text that quotes and on text that does not.

    python bench/speculation.py SESSIONS.jsonl [--requests N] [--model M] [--dtype D] [--threads N] [--drafts K]

SESSIONS.jsonl: recorded sessions of a coding agent, one a line, with "calls": [{"user": text, "assistant": text}, ...].

"edit": a tool's output is to be written again with a change; "summarise": to be summed up; "agent": the session goes on
as it was recorded. All three at batch 1, greedy. "chat 1" and "chat 16" are the chat workload of `bench/workloads.py`,
whose prompts are random tokens, one at a time and sixteen together, sampled.

Two engines with the same weights take turns, request by request (chat 16: group by group), so that both meet the same
moods of the machine. "cpu" compares CPU seconds instead of the clock's: steadier on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads import workloads

from pagemill import LLM, SamplingParams

LONGEST = 1200  # prompt tokens
TASKS = {
    "edit": "Write the following again, word for word, but call every file `main.py`:\n\n{text}",
    "summarise": "Sum up what this says, and quote the lines that matter:\n\n{text}",
}


@dataclass
class Record:
    """What one engine did on one workload."""

    tokens: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    drafts: int = 0
    accepted: int = 0
    texts: list[list[int]] = field(default_factory=list)

    def run(self, llm: LLM, prompts: Sequence[dict[str, Any]], params: Sequence[SamplingParams]) -> None:
        before = llm.statistics()
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params)
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        after = llm.statistics()
        self.drafts += after.draft_tokens - before.draft_tokens
        self.accepted += after.accepted_tokens - before.accepted_tokens
        self.texts += [output.outputs[0].token_ids for output in outputs]
        self.tokens += sum(len(output.outputs[0].token_ids) for output in outputs)


Job = tuple[list[dict[str, Any]], list[SamplingParams]]


def session_jobs(path: Path, llm: LLM, requests: int) -> dict[str, list[Job]]:
    """Name -> requests, each on its own."""
    tokenizer = llm.get_tokenizer()
    greedy = SamplingParams(temperature=0.0, max_tokens=160)

    def job(messages: list[dict[str, str]]) -> Job | None:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ([{"prompt_token_ids": ids}], [greedy]) if len(ids) <= LONGEST else None

    jobs: dict[str, list[Job]] = {"edit": [], "summarise": [], "agent": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        calls = json.loads(line)["calls"]
        told: list[dict[str, str]] = []
        for call in calls[1:]:  # the first one is the agent's instructions
            if 400 <= len(call["user"]) <= 3000:
                for name, task in TASKS.items():
                    jobs[name].append(job([{"role": "user", "content": task.format(text=call["user"])}]))
            jobs["agent"].append(job([*told, {"role": "user", "content": call["user"]}]))
            told += [{"role": "user", "content": call["user"]}, {"role": "assistant", "content": call["assistant"]}]
    found = {name: [each for each in all_jobs if each is not None] for name, all_jobs in jobs.items()}
    return {name: each[:: max(1, len(each) // requests)][:requests] for name, each in found.items()}


def chat_jobs(requests: int) -> dict[str, list[Job]]:
    rows = [
        ({"prompt_token_ids": prompt}, SamplingParams(temperature=0.8, seed=index, max_tokens=count, ignore_eos=True))
        for index, (prompt, count) in enumerate(workloads()["chat"])
    ]
    groups = [rows[start : start + 16] for start in range(0, len(rows), 16)][: max(2, requests // 4)]
    return {
        "chat 1": [([prompt], [params]) for prompt, params in rows[:requests]],
        "chat 16": [([p for p, _ in group], [s for _, s in group]) for group in groups],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--drafts", type=int, default=7, help="num_speculative_tokens")
    parser.add_argument("--only", nargs="+", help="names of workloads")
    args = parser.parse_args()
    settings = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "num_blocks_override": 2000}
    with_drafts = LLM(**settings, num_speculative_tokens=args.drafts)
    engines = {True: with_drafts, False: LLM(**settings, num_speculative_tokens=0)}
    print(f"{'workload':12}{'tokens':>8}{'without':>9}{'with':>8} tok/s{'ratio':>7}{'cpu':>7}{'drafts':>8}{'right':>7}")
    for name, jobs in {**session_jobs(args.sessions, with_drafts, args.requests), **chat_jobs(args.requests)}.items():
        if args.only and name not in args.only:
            continue
        records = {True: Record(), False: Record()}
        for turn, (prompts, params) in enumerate(jobs):
            for drafts in (turn % 2 == 0, turn % 2 == 1):
                records[drafts].run(engines[drafts], prompts, params)
        on, off = records[True], records[False]
        same = sum(one == other for one, other in zip(on.texts, off.texts, strict=True))
        rates = {each: record.tokens / record.wall for each, record in records.items()}
        cpu = (on.tokens / on.cpu) / (off.tokens / off.cpu)
        right = f"{on.accepted / on.drafts:.0%}" if on.drafts else "-"
        print(
            f"{name:12}{on.tokens:>8}{rates[False]:>9.1f}{rates[True]:>8.1f}      {rates[True] / rates[False]:>7.2f}"
            f"{cpu:>7.2f}{on.drafts:>8}{right:>7}   {same} of {len(on.texts)} texts the same",
            flush=True,
        )


if __name__ == "__main__":
    main()
