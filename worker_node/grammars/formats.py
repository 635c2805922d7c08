"""String formats of JSON Schema as EBNF, without the quotes."""

from __future__ import annotations

_DAY_28 = '("0" [1-9] | "1" [0-9] | "2" [0-8])'
_DATE = (
    '[1-9] [0-9]{3} "-" ('
    '("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30")'
    f' | "02" "-" {_DAY_28})'
)
_HOUR = '([01] [0-9] | "2" [0-3])'
_TIME = f'{_HOUR} ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{{1,6}})? ("Z" | [-+] {_HOUR} ":" [0-5] [0-9])'
_OCTET = '("25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9]? [0-9])'
# Rules that the formats refer to.
FORMAT_RULES = {
    # Two hyphens in a row would begin an encoded name, as in "xn--".
    "label": '[a-z0-9]{1,20} ("-" [a-z0-9]{1,20}){0,2}',
    "host": 'label ("." label){1,4}',
    "word": "[a-zA-Z0-9._~-]{0,40}",
    "link": '("https" | "http" | "ftp") "://" host ("/" word){0,8} ("?" word "=" word)?',
    "pointer": '("/" [a-zA-Z0-9._-]{0,15}){0,5}',
    "group": "[0-9a-f]{1,4}",
    "span": "[0-9]{1,4}",
}
# Groups on both sides of the `::` that stands for those left out.
_SHORT = (
    '"::" (group (":" group){0,5})?',
    *(f'group (":" group){{{left - 1}}} "::" (group (":" group){{0,{5 - left}}})?' for left in range(1, 6)),
    'group (":" group){5} "::"',
)
_DAYS = '(span "Y" (span "M" (span "D")?)? | span "M" (span "D")? | span "D")'
_HOURS = '"T" (span "H" (span "M" (span "S")?)? | span "M" (span "S")? | span "S")'

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [1-8] [0-9a-f]{3} "-" [89ab] [0-9a-f]{3} "-" [0-9a-f]{12}',
    "ipv4": f'{_OCTET} ("." {_OCTET}){{3}}',
    "hostname": "host",
    "email": '[a-zA-Z0-9_+-]{1,30} ("." [a-zA-Z0-9_+-]{1,15})? "@" host',
    "uri": "link",
    "uri-reference": 'link | ("/" word){1,8} ("?" word "=" word)?',
    "uri-template": "link",
    "iri": "link",
    "iri-reference": 'link | ("/" word){1,8} ("?" word "=" word)?',
    "ipv6": " | ".join(('group (":" group){7}', *_SHORT)),
    "json-pointer": "pointer",
    "relative-json-pointer": '("0" | [1-9] [0-9]{0,3}) pointer',
    "duration": f'"P" ({_DAYS} ({_HOURS})? | {_HOURS} | span "W")',
}
FORMATS["idn-email"] = FORMATS["email"]
FORMATS["idn-hostname"] = FORMATS["hostname"]
# Formats of the JSON Schema standard that are not held to here; any other is an annotation, as the standard has it.
REFUSED = frozenset({"regex"})
