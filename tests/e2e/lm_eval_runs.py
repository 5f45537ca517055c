"""A program: lm-eval asks the server at URL; prints what it asked and what it got, as JSON.

A process of its own, since the library reads its environment when it is imported. Runs in the
folder of the tasks.
"""

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

# By name: the model, its route, the tasks, and what else it is told.
RUNS: dict[str, tuple[str, str, list[str], dict[str, Any]]] = {
    "token ids": ("local-completions", "completions", ["small_choice", "small_answer"], {}),
    "text": ("local-completions", "completions", ["small_choice"], {"tokenized_requests": False}),
    "chat": ("local-chat-completions", "chat/completions", ["small_answer"], {}),
}


def main(url: str) -> None:
    manager = TaskManager(include_path=".", include_defaults=False)
    answers: dict[str, Any] = {}
    for name, (model, route, tasks, options) in RUNS.items():
        model_options = {"base_url": f"{url}/v1/{route}", "max_length": 512, "num_concurrent": 4}
        results = simple_evaluate(
            model=model,
            model_args={"model": "demo", **model_options, **options},
            tasks=tasks,
            task_manager=manager,
            apply_chat_template=model == "local-chat-completions",
            bootstrap_iters=0,
        )
        assert results is not None
        answers[name] = {
            task: [
                {"asked": asked, "got": got[0]}
                for sample in samples
                for asked, got in zip(sample["arguments"], sample["resps"], strict=True)
            ]
            for task, samples in results["samples"].items()
        }
        answers[name]["scores"] = results["results"]
    json.dump(answers, sys.stdout, default=str)


if __name__ == "__main__":
    main(sys.argv[1])
