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
    "label": "[a-z0-9] ([a-z0-9-]{0,20} [a-z0-9])?",
    "host": 'label ("." label){1,4}',
    "word": "[a-zA-Z0-9._~-]{0,40}",
}

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [1-8] [0-9a-f]{3} "-" [89ab] [0-9a-f]{3} "-" [0-9a-f]{12}',
    "ipv4": f'{_OCTET} ("." {_OCTET}){{3}}',
    "hostname": "host",
    "email": '[a-zA-Z0-9_+-]{1,30} ("." [a-zA-Z0-9_+-]{1,15})? "@" host',
    "uri": '("https" | "http" | "ftp") "://" host ("/" word){0,8} ("?" word "=" word)?',
}
# Formats of the JSON Schema standard that are not held to here; any other is an annotation, as the standard has it.
REFUSED = frozenset(
    {
        "duration",
        "idn-email",
        "idn-hostname",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    }
)
