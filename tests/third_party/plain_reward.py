"""Plain functions of one sample or of a group, with a module of their own beside them."""

import threshold


def long_enough(sample):
    return float(sample.length >= threshold.LEAST)


def by_level(sample, level):
    return float(level) * (sample.response == sample.answer)


def shortest_of_group(group):
    least = min(sample.length for sample in group)
    return [1.0 if sample.length == least else 0.0 for sample in group]


async def group_mean(group):
    mean = sum(len(sample.response) for sample in group) / len(group)
    return [mean] * len(group)
