"""A local bucket like Software Heritage's: /content/SHA1 is the gzip-compressed object, or 404."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections import Counter

from tests.data_mixtures.local_server import LocalServer


class FakeBucket(LocalServer):
    """`with FakeBucket(contents) as bucket:` serves at bucket.url; bucket.requests counts by sha1.

    flaws: answers to a sha1 before its object, in order: a status, or bytes. slow_s: seconds of
    every answer. down: 503 to all.
    """

    def __init__(self, contents: list[bytes], slow_s: float = 0.0) -> None:
        super().__init__()
        self.objects = {sha1(content): gzip.compress(content) for content in contents}
        self.requests: Counter[str] = Counter()
        self.flaws: dict[str, list[int | bytes]] = {}
        self.slow_s = slow_s
        self.down = False
        self.app.add_url_rule("/content/<name>", "content", self.answer)
        self.url += "/content/{sha1}"

    def answer(self, name: str) -> bytes | tuple[bytes, int]:
        self.requests[name] += 1
        time.sleep(self.slow_s)
        flaws = self.flaws.get(name)
        body: int | bytes = flaws.pop(0) if flaws else self.objects.get(name, 404)
        if self.down:
            body = 503
        return (b"no", body) if isinstance(body, int) else body


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
