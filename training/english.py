"""Generator of plain English sentences from common words, for training the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator

NOUNS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue side "
    "kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea kid body information back parent face others level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force education "
    "page model server token cache memory prompt answer letter music river tree street bird fish table chair "
    "window bread milk apple sun moon star snow rain wind fire stone road bridge train ship plane town "
    "village garden field hill sea island animal dog cat horse cow sheep king queen doctor nurse farmer "
    "soldier writer paper pen box bag shirt coat shoe hat ring gold silver iron glass wood price value test "
    "data file list code function class user error message request response example length size speed machine "
    "computer network language text sentence key map plan rule step sum total half dozen pair metre mile "
    "pound dollar cent percent second"
).split()
_VERBS = (
    "is was has had does did says said goes went gets got makes made knows knew thinks thought takes took "
    "sees saw comes came wants wanted looks looked uses used finds found gives gave tells told works worked "
    "calls called tries tried asks asked needs needed feels felt becomes became leaves left puts put means "
    "meant keeps kept lets begins began seems seemed helps helped talks talked turns turned starts started "
    "shows showed hears heard plays played runs ran moves moved likes liked lives lived believes believed "
    "holds held brings brought happens happened writes wrote provides provided sits sat stands stood loses "
    "lost pays paid meets met includes included continues learns learned changes changed leads led "
    "understands understood watches watched follows followed stops stopped creates created speaks spoke reads "
    "read spends spent grows grew opens opened walks walked wins won offers offered remembers considered "
    "appears bought waits serves sends expects builds stays falls cuts reaches kills remains sells eats "
    "drinks sings sleeps counts adds buys shares divides returns stores loads saves prints"
).split()
_ADJECTIVES = (
    "good new first last long great little own other old right big high different small large next early "
    "young important few public bad same able free sure clear full special easy strong certain whole open "
    "hard best better true short single past simple poor hot cold warm dark bright deep wide late quick slow "
    "heavy light happy sad quiet loud clean dirty rich cheap dear safe ready empty equal common real local "
    "final main several many much more most least such each every any some no all both another"
).split()
_FUNCTION_WORDS = (
    "the of and to in a that it for on with as at this but by from they we you he she his her or an will my "
    "one would there their what so up out if about who which go me when make can like time just him know take "
    "into your some could them see other than then now look only come its over think also back after use two "
    "how our work first well way even want because these give day most us not be have do I yes please thanks "
    "hello why where should must may might very too again never always often sometimes here down off under "
    "between before during without through against until while since although however therefore perhaps "
    "together already almost enough instead around am are were been being done going making three four five "
    "six seven eight nine ten hundred thousand"
).split()
_ENDINGS = (".", ".", ".", "?", "!", ";", ":", ",")


def sentences(seed: int) -> Iterator[str]:
    """Yields endless grammatical but meaningless sentences, the same for the same seed."""
    rng = random.Random(seed)

    def noun_phrase() -> str:
        return f"{rng.choice(_ADJECTIVES)} {rng.choice(NOUNS)}{rng.choice(('', '', 's'))}"

    while True:
        words = [
            rng.choice(_FUNCTION_WORDS),
            noun_phrase(),
            rng.choice(_VERBS),
            rng.choice(_FUNCTION_WORDS),
            rng.choice((noun_phrase(), rng.choice(NOUNS))),
            *rng.choices(_FUNCTION_WORDS, k=rng.randint(0, 5)),
        ]
        text = " ".join(words)
        yield (text.capitalize() if rng.random() < 0.7 else text) + rng.choice(_ENDINGS)
