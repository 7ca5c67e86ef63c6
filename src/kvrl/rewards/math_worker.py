"""The process in which answers are compared: `python math_worker.py SECONDS`, one JSON line in, one out.

It is run as a file, and imports nothing of kvrl: it would wait seconds for torch. Comparing `9^{9^9}` with a number
never ends, and no thread can stop it, so an answer that takes too long ends the process: that is SIGPROF's default.
"""

import json
import logging
import signal
import sys
from pathlib import Path


def main(seconds: float) -> None:
    """Answer `[gold, text]` with true, false, or null for a gold answer that cannot be parsed."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    print("ready", flush=True)
    for line in sys.stdin:
        golds, text = json.loads(line)
        # processor time, not the clock's: whether an answer counts must not depend on what else the machine does
        signal.setitimer(signal.ITIMER_PROF, seconds)
        parsed = [parse(gold, targets, parsing_timeout=None) for gold in golds]
        if all(parsed):
            answer = parse(text, targets, parsing_timeout=None)
            verdict = any(verify(gold, answer, timeout_seconds=None) for gold in parsed)
        else:
            verdict = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    here = Path(__file__).parent  # its modules are kvrl's and must not stand in for a library's
    sys.path = [path for path in sys.path if Path(path) != here]
    main(float(sys.argv[1]))
