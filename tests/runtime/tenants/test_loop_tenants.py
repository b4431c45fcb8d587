"""What the loop tells a tenant, beside another one's requests."""

from __future__ import annotations

from radixkv.settings.tenants import OPERATOR, TenantConfig
from support.fake_grammars import FakeGrammar
from support.loop_frontend import PROMPT, Frontend

TENANTS = (TenantConfig(OPERATOR, cache_salt="request"), TenantConfig("a"), TenantConfig("b"))


def make_front() -> Frontend:
    return Frontend(tenants=TENANTS, max_num_seqs=2)


def test_a_match_tells_a_tenant_of_its_own_load_and_the_operator_of_all() -> None:
    front = make_front()
    matched = front.match(PROMPT, tenant="a")
    for number in range(5):
        front.submit(f"b{number}", range(number, number + 20), tenant="b", max_tokens=9)
    front.turn()
    assert front.match(PROMPT, tenant="a") == matched
    assert (matched.n_running, matched.n_waiting) == (0, 0)
    assert (matched.n_pages_free, matched.n_pages_evictable) == (None, None)
    of_b, of_all = front.match(PROMPT, tenant="b"), front.match(PROMPT)
    assert (of_b.n_running, of_b.n_waiting) == (of_all.n_running, of_all.n_waiting) == (2, 3)
    assert of_all.n_pages_free == 54


def test_requests_that_wait_for_their_grammar_are_their_tenants_load() -> None:
    front = make_front()
    front.submit("a", tenant="a", structured_outputs=FakeGrammar().specification)
    loads = [front.match(PROMPT, tenant=tenant) for tenant in ("a", "b", OPERATOR)]
    assert [load.n_waiting for load in loads] == [1, 0, 1]
    assert [front.stats().tenants[tenant].n_waiting for tenant in ("a", "b")] == [1, 0]


def test_answers_without_a_seed_do_not_tell_how_many_others_have_drawn_one() -> None:
    def answers(n_others: int) -> list[list[int]]:
        front = make_front()
        for number in range(3):
            for other in range(n_others):
                front.submit(f"b{number}-{other}", tenant="b", seed=None)
            front.serve(f"a{number}", tenant="a", seed=None)
        return [front.received[f"a{number}"].tokens[0] for number in range(3)]

    alone = answers(0)
    assert alone[0] != alone[1], "each request draws another seed"
    assert answers(2) == alone
