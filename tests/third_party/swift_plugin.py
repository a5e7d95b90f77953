"""An external plug-in as people write it for ms-swift: --external_plugins plugin.py --reward_funcs external_math."""

import re
from typing import List

from swift.plugin import ORM, orms
from swift.utils import get_logger

logger = get_logger()


class MathORM(ORM):

    def __call__(self, completions, solution, **kwargs) -> List[float]:
        rewards = []
        for content, sol in zip(completions, solution):
            match = re.search(r'<answer>(.*?)</answer>', content)
            rewards.append(1.0 if match and match.group(1).strip() == sol else 0.0)
        return rewards


class LengthORM(ORM):

    def __init__(self, args=None, soft_max: int = 4):
        super().__init__(args)
        self.soft_max = soft_max

    def __call__(self, completions, **kwargs) -> List[float]:
        lengths = [len(ids) for ids in kwargs.get('response_token_ids')]
        return [min(0.0, float(self.soft_max - n)) for n in lengths]


orms['external_math'] = MathORM
orms['external_length'] = LengthORM
