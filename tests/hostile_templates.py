"""Chat templates that would hang, fill the memory or look around: each must end as its own request's error."""

CHAT = [{"role": "user", "content": "Hello!"}]
MAX_CHARS = 12_288
MAKERS = {  # of a value that holds its parts many times over: 2 ** 60 characters once it is written out
    "lists": ("[1]", "[ns.x, ns.x]"),
    "tuples": ("(1,)", "(ns.x, ns.x)"),
    "dicts": ("{}", "{'a': ns.x, 'b': ns.x}"),
    "dict calls": ("{}", "dict(a=ns.x, b=ns.x)"),
    "views": ("{}", "{'a': ns.x.items(), 'b': ns.x.values()}"),
    "sums": ("[1]", "[ns.x] + [ns.x]"),
    "products": ("[1]", "[ns.x] * 2"),
    "batches": ("[1]", "[1]|batch(3, ns.x)|list"),
    "keys": ("[1]", "{}.fromkeys('ab', ns.x)"),
}
WRITERS = {
    "printed": "{{ ns.x }}", "as a string": "{{ ns.x|string|length }}", "concatenated": "{{ 'x' ~ ns.x }}",
    "formatted": "{{ '%s'|format(ns.x) }}",
    "with percent": "{{ '%s' % [ns.x] }}", "in braces": "{{ '{}'.format(ns.x) }}",
    "in a block": "{% set y %}{{ ns.x }}{% endset %}", "raised": "{{ raise_exception(ns.x) }}",
    "upper": "{{ ns.x|upper }}", "replaced": "{{ ns.x|replace('a', 'b') }}", "trimmed": "{{ ns.x|trim }}",
    "escaped": "{{ ns.x|e }}",
}  # fmt: skip
DAG = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
RUNAWAY = {  # which take too much, or fail
    "syntax": "{% for %}",
    "undefined": "{{ messages[0].nope.deeper }}",
    "undefined function": "{{ nope() }}",
    "raises": "{{ raise_exception('only even turns') }}",
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "sums": "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "loops over text": "{% set s = 'xxxxxxxxxx' %}" + "{% for c in s %}" * 9 + "{% endfor %}" * 9,
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "wide recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loop recursion": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "output": "{% for i in range(9999) %}xxxxxxxxxx{% endfor %}",
    "repeat": "{{ 'x' * 10**9 }}",
    "repeat list": "{% set x = [0] * 10**9 %}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "tilde": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "blocks": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "width": "{{ '%1000000000d' % 1 }}",
    "filter width": "{{ 'x'|center(300000000) }}",
    "filter format": "{{ '%0300000000d'|format(1) }}",
    "filter batch": "{{ [1]|batch(300000000, 'x')|list|length }}",
    "filter replace": "{{ ('x' * 9000)|replace('x', 'y' * 9000)|length }}",
    "filter join": "{{ (['x' * 9000] * 9000)|join|length }}",
    "filter indent of JSON": "{{ [[1]]|tojson(indent=300000000) }}",
    "filters together": "{{ (['x' * 9000] * 9000)|map('upper')|list|length }}",
    "filter constants": "{{ ('x'|center(300000000))|length }}",
    "method width": "{{ 'x'.ljust(300000000)|length }}",
    "method format": "{{ '{:>300000000}'.format(1)|length }}",
    "method format width": "{{ '{:>{}}'.format(1, 300000000)|length }}",
    "method join": "{{ ''.join(['x' * 9000] * 9000)|length }}",
    "numbers": "{% set ns = namespace(n=9**60) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "deep list": "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "power of a power": "{% set ns = namespace(n=2) %}{% for i in range(40) %}{% set ns.n = ns.n ** 60 %}{% endfor %}",
    "power of a float": "{{ 10 ** 9.5e8 }}",
    "rounded to a huge precision": "{{ 5|round(0 - 100000000) }}",
    "rounded up to a huge precision": "{{ 5|round(100000000, 'ceil') }}",
    "float rounded": "{{ 5.5|round(100000000, 'floor') }}",
    "many digits": "{{ ('9' * 4299)|int * ('9' * 4299)|int }}",
    "bytes to a number": "{{ 5.from_bytes(('x' * 4000).encode(), 'big') }}",
    "bytes formatted": "{{ ('%s' * 2000).encode() % ([('y' * 2000).encode()] * 2000) }}",
    "markup stripped": "{{ ('<!--' * 900)|e.striptags() }}",
    "separators": "{{ [[1] * 900]|tojson(separators=('x' * 4000, ':')) }}",
    "long date": "{{ strftime_now('%c' * 2000) }}",
    "lists added up": "{{ ([[1] * 90] * 90)|sum(start=[]) }}",
    "blocks that call themselves": "{% set ns = namespace(d=0) %}{% block a %}{% if ns.d < 60 %}"
    "{% set ns.d = ns.d + 1 %}"
    "{{ self.a() }}{{ self.a() }}{% set ns.d = ns.d - 1 %}{% endif %}{% endblock %}",
    "selected again and again": "{% set s = ('zy' * 2000) %}{% for i in range(9999) %}"
    "{% set x = (['z' * 900] * 900)|select('in', s)|list %}{% endfor %}",
    "searched again and again": "{% set s = ('z' * 4000) %}{% for i in range(300) %}{% for j in range(999) %}"
    "{% if ('z' * 2000 ~ 'y') in s %}x{% endif %}{% endfor %}{% endfor %}",
    "split again and again": "{% for i in range(299999) %}{% set x = ('a ' * 2000).split() %}{% endfor %}",
    "replaced again and again": "{% for i in range(299999) %}{% set x = ('a ' * 2000).replace('a', 'b') %}{% endfor %}",
    "caller": "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f(1) %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if 1 %}" * 3_000 + "x" + "{% endif %}" * 3_000,
    "negations": "{{ " + "not " * 20_000 + "1 }}",
    "unclosed": "{# " * 40_000,
    "huge source": "x" * 300_000 + "{{ 1 }}",
    "dag of dicts": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
    "dag of views": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x.items(), 'b': ns.x.values(), 'c': ns.x} %}{% endfor %}{{ ns.x }}",
    "dag of sums": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x] + [ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "dag of products": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}"
    "{{ ns.x }}",
    "dag of batches": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [1]|batch(3, ns.x)|list %}{% endfor %}{{ ns.x }}",
    "dag of iterated batches": "{% set ns = namespace(x=[1]) %}{% for i in range(9) %}"
    "{% for b in [1]|batch(999, ns.x) %}{% set ns.x = b %}{% endfor %}{% endfor %}{{ ns.x }}",
    "dag of arguments": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}"
    "{% endmacro %}{{ f(60, 1) }}",
    "dag of keywords": "{% macro f(n) %}{% if n %}{{ f(n - 1, a=kwargs, b=kwargs) }}{% else %}{{ kwargs }}{% endif %}"
    "{% endmacro %}{{ f(60, a=1) }}",
    "dag of pairs": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x}|items|list %}{% endfor %}{{ ns.x }}",
    "dag of keys": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = {}.fromkeys('ab', ns.x) %}{% endfor %}{{ ns.x }}",
    "dag as JSON": DAG + "{{ ns.x|tojson }}",
    "dag as indented JSON": DAG + "{{ ns.x|tojson(indent=2) }}",
    "dag pprint": DAG + "{{ ns.x|pprint }}",
    "dag compared": DAG + "{% set a = ns.x %}" + DAG + "{{ a == ns.x }}",
    "dag sorted": DAG + "{{ [ns.x, ns.x, ns.x]|sort }}",
} | {
    f"{made} {written}": f"{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set ns.x = {more} %}}"
    f"{{% endfor %}}{text}"
    for i, (made, (first, more)) in enumerate(MAKERS.items())
    for j, (written, text) in enumerate(WRITERS.items())
    if (i + j) % 4 == 0  # three writers of each, two makers of each and more
}
EITHER = {  # which end, however much they are given
    "power": "{{ 10 ** 10 ** 8 }}",
    "filter indent": "{{ ('\\n' * 9000)|indent(9000)|length }}",
    "dag searched": DAG + "{{ [0] in ns.x }}",
    "dag selected": DAG + "{{ [ns.x, ns.x]|select('eq', ns.x)|list|length }}",
    "dag counted": DAG + "{{ ns.x.count(ns.x[0]) }}",
    "negative power": "{{ 2 ** (0 - 10 ** 9) }}",
    "translated": "{{ ('a' * 4000).translate({97: 'y' * 4000})|length }}",
    "bytes joined": "{{ ('x' * 4000).encode().join([''.encode()] * 4000)|length }}",
    "bytes replaced": "{{ ('x' * 4000).encode().replace('x'.encode(), ('y' * 4000).encode())|length }}",
    "many fields": "{{ ('{0}' * 1000).format('y' * 4000)|length }}",
    "many fields of a list": "{{ ('{0}' * 1000).format(['y' * 400])|length }}",
    "many percents": "{{ (('%(a)s' * 900) % {'a': 'y' * 4000})|length }}",
    "format of a map": "{{ ('{a}' * 1000).format_map({'a': 'y' * 4000})|length }}",
    "expanded tabs": "{{ ('\\t' * 4000).expandtabs(4000)|length }}",
    "values kept": "{% set ns = namespace(x=()) %}{% for i in range(9999) %}"
    "{% set ns.x = (ns.x, 'y' * 4000) %}{% endfor %}",
    "many variables": "".join(f"{{% set a{i} = ('x' * 4000)|upper %}}" for i in range(999)),
    "long sum": "{{ " + "1 + " * 20_000 + "1 }}",
    "dag joined by a method": DAG + "{{ ','.join(ns.x) }}",
    "dag unique": DAG + "{{ [ns.x, ns.x]|unique|list|length }}",
    "dag grouped": DAG + "{{ [ns.x, [ns.x]]|groupby(0)|list }}",
    "dag indexed": DAG + "{{ ns.x.index([0]) }}",
    "namespaces in namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns = namespace(a=ns, b=ns) %}{% endfor %}{{ raise_exception(ns) }}",
}
WALKS = {  # to what a template may not see
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "mutation": "{{ messages.append(1) }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "frames": "{{ ((x for x in [1])).gi_frame }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "the environment": "{{ self._TemplateReference__context.environment.deadline }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "attr": "{{ (''|attr('__class__')).__name__ }}",
    "map of attributes": "{{ ['']|map(attribute='__class__')|map(attribute='__mro__')|list|tojson }}",
    "mro by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
}
