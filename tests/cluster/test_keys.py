"""What processes of one cluster share, and no others."""

from __future__ import annotations

from tandem.cluster.keys import ClusterKey


def test_processes_with_the_same_words_share_a_key_and_a_namespace() -> None:
    first, second, other = (ClusterKey.of(text * 4) for text in ("words", "words", "other"))
    assert (first.secret, first.namespace) == (second.secret, second.namespace)
    assert first.secret != other.secret
    assert first.namespace != other.namespace
    assert first.namespace not in first.secret.hex(), "the namespace can be read in Redis"
    assert first.first_epoch > 1_700_000_000, "after all epochs of an earlier launcher"


def test_without_words_nobody_shares_anything() -> None:
    first, second = ClusterKey.of(None), ClusterKey.of(None)
    assert first.secret != second.secret
    assert first.namespace != second.namespace
    assert first.first_epoch == 0
