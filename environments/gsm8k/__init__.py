"""GSM8K: grade-school word problems whose answer is one number."""

from rollouts.recipes.environments.gsm8k.task import CalculatorGSM8K, SingleTurnGSM8K, gsm8k_reward, load_gsm8k

__all__ = ["CalculatorGSM8K", "SingleTurnGSM8K", "gsm8k_reward", "load_gsm8k"]
