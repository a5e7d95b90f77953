"""Custom reward functions as people write them for verl (custom_reward_function.path and .name)."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    answer = solution_str.split("####")[-1].strip()
    bonus = 0.5 if extra_info and extra_info["split"] == "train" else 0.0
    return {"score": float(answer == ground_truth) + bonus, "acc": answer == ground_truth}


def score_plainly(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0 if ground_truth in solution_str else 0.0
