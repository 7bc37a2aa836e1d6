# ruff: noqa: E501 (templates are one line each)
"""Hostile chat templates: each ends within a second and 64 MiB, with a text or with a typed error, and so does the next usual one."""

import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.chat_template import compile_template

NS = "{% set ns = namespace(x='ab', y=[], z=()) %}"
DAG = NS + "{% for i in range(60) %}{% set ns.y = [ns.y, ns.y] %}{% set ns.z = (ns.z, ns.z) %}{% endfor %}"
TWO = DAG + "{% set one = ns.y %}" + DAG + "{% set two = ns.y %}"
LONG = NS + "{% for i in range(22) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"  # 8 million characters
HOSTILE = {
    "ljust": "{{ 'a'.ljust(3*10**8) }}",
    "rjust": "{{ 'a'.rjust(300000000) | length }}",
    "center": "{{ 'a'.center(3*10**8) }}",
    "zfill": "{{ 'a'.zfill(3*10**8) }}",
    "expandtabs": "{{ '\\t'.expandtabs(3*10**8) }}",
    "expandtabs by name": "{{ '\\t'.expandtabs(tabsize=3*10**8) }}",
    "center filter": "{{ 'a' | center(300000000) }}",
    "center filter at length": "{{ ('a' | center(300000000)) | length }}",
    "percent": "{{ '%300000000d' % 1 }}",
    "percent star": "{{ '%*d' % (300000000, 1) }}",
    "percent precision": "{{ '%.300000000f' % 1.5 }}",
    "percent key": "{{ '%(a)300000000d' % {'a': 1} }}",
    "format filter": "{{ '%300000000d' | format(1) }}",
    "format": "{{ '{:300000000d}'.format(1) }}",
    "format nested": "{{ '{:{}d}'.format(1, 300000000) }}",
    "format_map": "{{ '{a:300000000d}'.format_map({'a': 1}) }}",
    "format by map": "{{ (['{:300000000d}'] | map('format', 1)) | list }}",
    "indent": "{{ 'a\nb' | indent(300000000) }}",
    "indent first": "{{ 'a' | indent(300000000, true) }}",
    "indent text": "{{ ('\n' * 10**6) | indent('x' * 10**4, blank=true) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=300000000) }}",
    "tojson separators": "{{ ([1] * 10**5) | tojson(separators=('x' * 10**5, ':')) }}",
    "repetition": "{{ 'a' * 10**9 }}",
    "list repetition": "{{ ([0] * 10**9) | length }}",
    "tuple repetition": "{{ ((0,) * 10**9) | length }}",
    "repetitions": "{% for i in range(99999) %}{% set x = 'a' * 10**7 %}{% endfor %}",
    "range": "{% for i in range(10**12) %}{% endfor %}",
    "range elements": "{{ range(99999) | list | length }}{% set x = [range(99999) | list, range(99999) | list] * 99 %}{{ x | string }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if j is string %}{% endfor %}{% endfor %}",
    "loops with output": "{% for i in range(99999) %}{% for j in range(99999) %}text{% endfor %}{% endfor %}",
    "loops into a block": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}text{% endfor %}{% endfor %}{% endset %}",
    "loops of long pieces": "{% set x %}{% for i in range(99999) %}" + "long text " * 500 + "{% endfor %}{% endset %}{{ x }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "doubling": NS + "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": NS + "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling a list": NS + "{% for i in range(99) %}{% set ns.y = ns.y + ns.y + [1] %}{% endfor %}",
    "doubling in a block": NS + "{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    + NS
    + "{% for i in range(99) %}{% set ns.x = f(ns.x) %}{% endfor %}",
    "doubling by replace": NS + "{% for i in range(99) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "doubling by join": NS + "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "doubling by format": NS + "{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubling by percent": NS + "{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling by text": NS + "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | string %}{% endfor %}",
    "doubling by json": NS + "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | tojson %}{% endfor %}",
    "doubling by escapes": NS + "{% for i in range(99) %}{% set ns.x = [ns.x] | string | string | escape | string | tojson %}{% endfor %}",
    "join": "{{ ('a' * 10**6).join(['b'] * 10**5) }}",
    "join filter": "{{ (['b'] * 10**5) | join('a' * 10**6) }}",
    "join attribute": "{{ ([{'a': 'x' * 10**6}] * 10**5) | join(attribute='a') }}",
    "sum": "{{ ([[0] * 1000] * 10**5) | sum(start=[]) | length }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replace nothing": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "replace by name": "{{ ('a' * 10**6) | replace('a', new='b' * 10**6) }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "encode": "{{ ('a' * 10**6).encode('utf-8').center(10**9) }}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) | length }}",
    "split": "{% for i in range(999) %}{% set x = (' a' * 10**6).split() %}{% endfor %}",
    "splitlines": "{{ ('\n' * 10**7).splitlines() | length }}",
    "retained": NS + "{% for i in range(99999) %}{% set ns.y = ns.y + [('a' * 99999) ~ i] %}{% endfor %}",
    "retained slices": LONG + "{% for i in range(99999) %}{% set ns.y = [ns.y, ns.x[1:]] %}{% endfor %}",
    "retained lists": NS + "{% for i in range(99999) %}{% for j in range(99999) %}{% set ns.y = [ns.y, 1, 2, 3, 4, 5, 6] %}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(500) }}",
    "two macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f(1) %}" * 30 + "{% endcall %}" * 30,
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "shared text": DAG + "{{ ns.y }}",
    "shared string": DAG + "{{ ns.y | string | length }}",
    "shared tilde": DAG + "{{ ('' ~ ns.y) | length }}",
    "shared json": DAG + "{{ ns.y | tojson }}",
    "shared percent": DAG + "{{ '%s' % [ns.y] }}",
    "shared percent r": DAG + "{{ '%r' % [ns.y] }}",
    "shared format": DAG + "{{ '{}'.format(ns.y) }}",
    "shared format r": DAG + "{{ '{!r}'.format(ns.y) }}",
    "shared join": DAG + "{{ [ns.y] | join }}",
    "shared trim": DAG + "{{ ns.y | trim }}",
    "shared upper": DAG + "{{ ns.y | upper }}",
    "shared upper test": DAG + "{{ ns.y is upper }}",
    "shared compared": TWO + "{{ one == two }}",
    "shared not equal": TWO + "{{ one != two }}",
    "shared less": TWO + "{{ one < two }}",
    "shared test": TWO + "{{ one is eq two }}",
    "shared select": TWO + "{{ [one] | select('eq', two) | list }}",
    "shared in": TWO + "{{ one in [two] }}",
    "shared in test": TWO + "{{ one is in [two] }}",
    "shared index": TWO + "{{ [two].index(one) }}",
    "shared count": TWO + "{{ [two].count(one) }}",
    "shared sort": TWO + "{{ [one, two] | sort }}",
    "shared max": TWO + "{{ [one, two] | max }}",
    "shared unique": DAG + "{{ [ns.z, ns.z] | unique | list }}",
    "shared key": DAG + "{{ {ns.z: 1} | length }}",
    "shared lookup": DAG + "{{ {'a': 1}[ns.z] }}",
    "shared get": DAG + "{{ {'a': 1}.get(ns.z) }}",
    "shared dict": DAG + "{{ dict([(ns.z, 1)]) | length }}",
    "shared changed": TWO + "{% for i in [one, two] %}{{ loop.changed(i) }}{% endfor %}",
    "shared namespaces": NS + "{% for i in range(60) %}{% set m = namespace(a=ns.y, b=ns.y) %}{% set ns.y = m %}{% endfor %}{{ ns.y }}",
    "namespace in itself": NS + "{% set ns.y = ns %}{{ ns }}",
    "long in lists": "{% set a = 'x' * 10**6 ~ 'a' %}{% set b = 'x' * 10**6 ~ 'b' %}{{ a in [b] * 10**5 }}",
    "long sorted": "{% set a = 'x' * 10**6 ~ 'a' %}{% set b = 'x' * 10**6 ~ 'b' %}{{ ([a, b] * 10**5) | sort | length }}",
    "long compared": LONG + "{% set y = 'a' ~ ns.x[1:] %}" + "{{ y == ns.x }}" * 2000,
    "long searched": LONG + "{{ ns.x.count('ba') }}" * 1500,
    "long contained": LONG + "{{ 'ac' in ns.x }}" * 2000,
    "select": "{% set x = [0] * 700000 %}" + "{{ x | select('string') | first }}" * 1000,
    "map": "{% set x = [0] * 700000 %}" + "{{ x | map(attribute='a') | list | length }}" * 1000,
    "power": "{{ 7 ** (10**9) }}",
    "squares": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "round": "{{ 5 | round(-10**9) }}",
    "round up": "{{ 5 | round(10**9, 'ceil') }}",
    "long integer": "{{ ('9' * 10**6) | int(base=36) }}",
    "date": "{{ strftime_now('%c' * 10**6) }}",
    "date width": "{{ strftime_now('%1000000000d') | length }}",
    "nested brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "nested lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "nested loops": "{% for i in [1] %}" * 200 + "{% endfor %}" * 200,
    "long sum": "{{ 1" + "+1" * 20000 + " }}",
    "long": "a" * 10**7,
    "urlize": "{{ ('www.' * 10**6) | urlize }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "wordwrap": "{{ ('a ' * 10**6) | wordwrap(1) }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "autoescape": "{% autoescape true %}{{ '<' * 10**7 }}{% endautoescape %}",
    "markup": "{{ ('' | safe) + '<' * 5 * 10**6 }}",
    "markup percent": "{{ ('%s' | safe) % ('<' * 5 * 10**6) }}",
    "markup join": "{{ (',' | safe).join(['<' * 10**6] * 9) }}",
    "markup format": "{{ ('{:300000000d}' | safe).format(1) }}",
    "markup center": "{{ ('a' | safe).center(300000000) }}",
    "markup repeated": "{{ ('a' | safe) * 10**9 }}",
    "markup replace": "{{ ('a' * 10**6 | safe) | replace('a', 'b' * 10**6) }}",
}
MESSAGES = [{"role": "user", "content": "hi"}]


SECONDS = 30  # on a usual machine a template takes less than 1 s; a busy one, with all memory traced, must not fail


def render(source: str, **variables: Any) -> str | None:
    """The text, or None if it was refused. Fails if compiling or rendering took too long."""
    started = time.thread_time()
    try:
        run = compile_template(source)
        compiled, started = time.thread_time() - started, time.thread_time()
        assert compiled < SECONDS, compiled
        return run({"messages": MESSAGES, **variables})
    except InvalidRequestError as error:
        assert len(str(error)) < 2000
        return None
    finally:
        took = time.thread_time() - started
        assert took < SECONDS, took


@pytest.mark.unhooked
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_ends_soon(case: str) -> None:
    render(HOSTILE[case])
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    "case", [case for case in HOSTILE if not case.startswith(("shared", "select", "map", "two macros"))]
)  # slow if traced
@pytest.mark.unhooked
def test_a_hostile_template_takes_little_memory(case: str) -> None:
    tracemalloc.start()
    try:
        render(HOSTILE[case])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


MUST_FAIL = ("ljust", "percent", "format", "indent", "tojson indent", "repetition", "range", "loops", "doubling", "macros", "shared text")


@pytest.mark.parametrize("case", MUST_FAIL)
def test_the_message_names_the_limit(case: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"exceed(s)? (\d|0\.)|Range too big.*100000|recursion depth"):
        compile_template(HOSTILE[case])({"messages": MESSAGES})


VALUES = st.sampled_from(
    ["messages", "ns.x", "ns.y", "'ab'", "[1, 'a']", "(2, 3)", "{'a': [1]}", "7", "10**6", "300000000", "none", "range(9999)"]
)
OPERATIONS = st.sampled_from(
    ["({a} ~ {b})", "({a} + {b})", "({a} * {b})", "({a} % {b})", "({a} ** {b})", "({a} == {b})", "({a} in {b})", "[{a}, {b}]", "{a}[{b}:]"]
    + [
        f"({{a}} | {name})"
        for name in ("string", "tojson", "trim", "upper", "list", "sort", "unique | list", "reverse", "length", "first", "sum")
    ]
    + [
        f"({{a}} | {name}({{b}}))"
        for name in ("join", "indent", "center", "tojson", "round", "format", "truncate", "default", "map", "sum")
    ]
    + [f"{{a}}.{name}({{b}})" for name in ("ljust", "join", "split", "format", "index", "get", "zfill", "replace", "expandtabs", "count")]
)


@st.composite
def expressions(draw: st.DrawFn) -> str:
    text = draw(VALUES)
    for _ in range(draw(st.integers(1, 4))):
        text = draw(OPERATIONS).replace("{b}", draw(VALUES)).replace("{a}", text)
    return text


@settings(max_examples=25, deadline=None)
@given(first=expressions(), second=expressions())
def test_any_expression_in_a_loop_ends_soon(first: str, second: str) -> None:
    loop = "{% for i in range(9999) %}{% set ns.x = FIRST %}{% set ns.y = SECOND %}{% endfor %}{{ ns.x }}{{ ns.y }}"
    tracemalloc.start()
    try:
        render(NS + loop.replace("FIRST", first).replace("SECOND", second))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_long_conversation_is_rendered() -> None:
    long = [{"role": "user", "content": "é" * 2_000_000}] * 3
    template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\n' }}{{ m.content.split('x')[0] | length }}{% endfor %}"
    text = compile_template(template)({"messages": long})
    assert text == ("<user>" + "é" * 2_000_000 + "\n" + "2000000") * 3


USUAL = [
    "{{ 'a' + 1 | string }}{{ 'x' ~ 1 ~ none ~ [1, 'é', {'a': 2.5}] }}{{ [1] + [2] }}{{ 3 * 'ab' }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}",
    "{{ '%s-%05d' % ('a', 3) }}{{ '%s' | format('b') }}{{ '{:>5}|{!r}|{a[0]}'.format('a', 'b', a=[1]) }}{{ '{x}'.format_map({'x': 1}) }}",
    "{{ ' a b '.split() }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a\nb'.splitlines() }}{{ 'ab'.center(7, '*') }}{{ 'aXa' | replace('X', 'Y') }}",
    "{{ 'a\n\nb' | indent(2) }}|{{ 'a\n\nb' | indent('--', true, true) }}|{{ '' | indent }}|{{ 'ab' | center(6) }}|{{ 'b\n' | indent }}",
    "{{ [3, 1, 2] | sort }}{{ [1, 1] | unique | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 2] | sum }}{{ [1, 2] | min }}{{ 'ab' | reverse }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 2.567 | round(1) }}",
    "{{ messages | groupby('role') | map('first') | list }}{{ 'abc'[::-1] }}{{ [1, 2, 3][1:] }}{{ 'a' in 'abc' }}{{ 'x' not in ['x'] }}{{ 1 < 2 < 3 }}",
    "{{ ('<' | safe) + '<' }}{{ '<' | e }}{{ 2.2 | round(method='ceil') }}{{ 2.8 | round(0, 'floor') }}{{ messages[0]['role'] }}",
    "{% macro f(m, n=2) %}[{{ m.role }}{{ n }}{{ caller() if caller else '' }}]{% endmacro %}{{ f(messages[0]) }}{% call f(messages[1], 3) %}c{% endcall %}",
    "{% for m in messages recursive %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ loop.length }}{{ m.missing is defined }}{% else %}none{% endfor %}",
    "{% set ns = namespace(a=1) %}{% for m in messages if m.role == 'user' %}{% set ns.a = ns.a + 1 %}{{ loop.last }}{% endfor %}{{ ns.a }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}{{ dict(a=1).get('a') }}{{ {'a': 1}.items() | list }}",
    "{{ 'abcdef' | truncate(4) }}{{ 'a b' | title }}{{ 'a' | default('b') }}{{ x | default('c') }}{{ '5' | int + 1 }}{{ none }}{{ true }}{{ 1.0 }}",
    "{{ messages[-1].content }}{{ messages[0].nothing }}{{ messages | length - 1 }}{{ 'a' if messages[0].role is string else 'b' }}{{ [] is iterable }}",
]


@pytest.mark.parametrize("source", USUAL)
def test_usual_templates_have_the_text_of_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é <b>"}, {"role": "user", "content": ""}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=source)
    assert compile_template(source)({"messages": messages}) == expected[0]
