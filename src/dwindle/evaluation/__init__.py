"""Zero-shot tasks and perplexity on local files, with two engines that agree: ours and lm-evaluation-harness.

from dwindle.evaluation import evaluate
print(evaluate("smollm2-135m", ["commonsense"], data=["eval"], limit=100).to_json())
"""

from dwindle.evaluation.evaluate import evaluate, evaluate_model
from dwindle.evaluation.results import EvalResult

__all__ = ["EvalResult", "evaluate", "evaluate_model"]
