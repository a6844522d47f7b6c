"""Passages to measure the range of K and V with: what people send to a language model, in little.

Station: read by `kv_scales`. Written for this purpose; they say nothing. Each is a sequence of its own, since the first
tokens of a sequence are among those with the largest values.
"""

from __future__ import annotations

from typing import Final

PASSAGES: Final = (
    # Prose, with names, numbers and quotation.
    "The harbour office opened at seven, an hour before the first ferry. Miriam had the ledger under her arm and a "
    'pencil behind her ear. "Forty-two crates," she said, "and three of them wet." The captain shrugged; it had '
    "rained since Tuesday, the 14th of March, and nobody on the quay remembered a drier spring. In 1987 the town had "
    "built a second breakwater, 310 metres long, yet the swell still found its way in. By noon the crates were on the "
    "train, and the ledger said 42, as it always did.",
    # A question and its answer, as a chat has them.
    "User: How do I find out which process listens on port 8080?\nAssistant: On Linux you can use `ss`:\n\n"
    "1. Run `ss -ltnp 'sport = :8080'`.\n2. The last column names the program and its process id.\n3. If it is empty, "
    "run the command with sudo, since other users' processes are hidden.\n\n**Note:** on macOS the command is "
    "`lsof -nP -iTCP:8080 -sTCP:LISTEN`.\n\nUser: Thanks! And how do I stop it?\nAssistant: Send it a signal: "
    "`kill 12345`. Only if it does not end within some seconds, use `kill -9 12345`.",
    # Code.
    'def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:\n    """Join what overlaps."""\n'
    "    merged: list[tuple[int, int]] = []\n    for start, end in sorted(intervals):\n        if merged and start <= "
    "merged[-1][1]:\n            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))\n        else:\n"
    "            merged.append((start, end))\n    return merged\n\n\nfor (int i = 0; i < n; ++i) { sum += a[i] * b[i]; "
    "}  // O(n)\nSELECT name, COUNT(*) FROM orders WHERE paid = 1 GROUP BY name HAVING COUNT(*) > 3;\n",
    # Structure and numbers.
    '{"id": 1043, "tags": ["alpha", "beta"], "price": 19.99, "nested": {"ok": true, "missing": null}}\n'
    "| year | units | share |\n|------|-------|-------|\n| 2021 | 1,204 | 12.5% |\n| 2022 | 1,377 | 13.1% |\n"
    '<div class="row"><a href="https://example.org/a?b=c&d=e">link</a></div>\n'
    "f(x) = \\frac{1}{\\sqrt{2\\pi}} \\int_{-\\infty}^{x} e^{-t^2/2} dt,  x \\in \\mathbb{R}\n\n\n\n- - - -\n"
    "    \t    \n",
    # Other languages and scripts.
    "Der Zug nach Norden fuhr pünktlich ab, aber der Speisewagen blieb geschlossen. Le marché ouvre à huit heures, "
    "même en hiver. ¿Dónde está la biblioteca? Поезд отправляется в девять часов вечера. 今天的天气很好,我们去公园。"
    "東京駅で新幹線に乗り換えます。 كيف حالك اليوم؟ आज मौसम अच्छा है। 🙂🚀",
    # Repetition, which heads that copy attend to.
    "one two three one two three one two three one two three. the the the the the the the the. AAAAAAAAAAAAAAAAAAAA\n"
    "0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9\nno no no no, yes yes yes yes, no no no no.",
)
