"""A delta of each encoding, for compiling what decodes them: encoding one takes kernels that a server has no use for.

tests/engines/live/test_ahead.py writes this table anew where a codec has changed.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

from ...core.codecs import ENCODINGS
from ...core.dtypes import Bits
from ...core.schema import Schema, TensorSpec
from ...core.sparse import DeltaFile

SPEC = TensorSpec("w", "BF16", (128, 256))


def weights(version: int = 0) -> Bits:
    """The bits that the deltas start from, or lead to."""
    numbers = np.arange(SPEC.units, dtype=np.int64)
    changed = version * (numbers * 48271 % 331 == 0)
    bits: Bits = (0x3C00 + numbers * 40503 % 1021 + changed).astype(np.uint16)
    return bits.reshape(SPEC.shape)


def open_all() -> list[DeltaFile]:
    """A file of each encoding."""
    files = []
    for encoding in ENCODINGS:
        data = zlib.decompress(base64.b85decode(DELTAS[encoding]))
        files.append(DeltaFile(lambda start, size, d=data: d[start : start + size], len(data), Schema.build([SPEC])))  # type: ignore[misc]
    return files


DELTAS = {
    "raw": (
        "c-n=Ldx%tZ6vscCw3%9I+oF}$cF{~7*SRyZcjj)tN1Kmavn4Y%TXtvf+{f;;J2TtN-CcKWl3oNNJ-`YvLMw!jUIZdNpa)V!FNBa@L?Jz(2bP"
        "GvyLTbQzxw@mzUO?t=lssu)4=50YUJ}JKXg1Nbn<zleX9{vswF2h+6~Vi3Z1cH)i)Bxs9&uWE9FQvqo_9QRBL_|gw>Ha>zCb%S1k8OO4S*Q1"
        "b4tG_xoNxs&h)UNVe@rEjTqlf7&S-Nu^5EC4Z)SSP7k>(`Y)CwQ~P8Er#PU*=pOCojv9075n{KJaP~OW}B5O6w-cR+L^SIGqbLhbzLuM72HY"
        "SRIO*GJ=0DnqfDw`7ktNaGp5y+3bMAFO4>Q2o-oE*i)F9q`n7m5UN}A+f4VcBipLpn;;7rUdm__#dzB!l`C(MrolK-{t7noQb%sXH#IIdtTK"
        "~gGbfV49^wjGu@r|yJZuRI{@YNJZoDE}*@a8#i-nnqgG<a${{4@jX^WokL;KP}4$%WuI!3!6`AI-38Hat8BKED_iUJBK@@Y+0>dO56*x;$|O"
        "d~ZNzK5Sb6?_LSbS3%z**uNM~EP;-tu%i`@ECa)YQVI^HVM-fxS+FY$M{}^O9VV`ZLjq<h=+?0B8aUPgVmaKu0uHZ)dDp?fYIvy={$2x}Yhm"
        "XN@MRY)z7a;&!Rt4{^qXPh2H3k1e%J)r&2aav@P0SU=>fMFp3B2;eXybc54!NF2MYoi?uS<fpz$_XHwcdp!M7zyRiHi$@7xYeHRuiDnGrZX3"
        "VI7{ABT@8pydu2tiypjp+WqqewQc3ulkt!S^g-#)8DA0@@w&h{!D!$kBGziBlUrNPrR)Uskh`C;#K{!Iw%i_7xnY%S-D^A(@(1><sPwH?^2J"
        "+N5n(=0kuPJ7x(FV)Ln9$n9y6)s0>9#m(-vv3QreQpX?Qz^(M7Jt`}W;ty&{ji{-jQX(>fcTPh<{VyRxD7RiOe&@JjRIakcq&8kVx5;OEPHB"
        "~l>2K|rxOPtgv)N%QX_!s6r7H|"
    ),
    "packed": (
        "c-q^+$N&b_O7ZczsU?Xii6x2g@k&<JN@@8;xrrr8R!S+UIVFkZnMJ8eI!a}!Ma7x<c|cJ^Ag{O}v8Xr|$SEl*1<9u7CFiGP=A{Eg3KEmEQ&W"
        "Iq$r*`x>8UC4K&6Sf#XuQLOQ2{{VsUCb!Y~7%P;NfZqIgsbO7cq*a}ZjMjm*s~VD@H~RDyKsSz4M|n#0XZ$xKfz2Dv&dEzQu>%pxhtI5o}C("
        "!@B?!q7a~%se?c#lS2n8LR=WHpS35#n95&04QUWWSNwjn38N_Xl81ZW^S2mWMB!hGBYnFwIaSavkK&0BV%)=TBsN(s8UKQ3qazbV8>-7f;iE"
        "J78bEUJ3!%?pO#jfS_1Szw1Eyt7^pWXCqFq`&j18)nqX>)X#h~Wj**FZY;COq7-($O|EutJE-S;ObJ}tROV2TW>VDM~B_kR6GS~No{nYhbzR"
        "H(lS>3+Yb1+_>z2<^M+meGWoXSR5lNS1Bb{q1Y2)bBM6}jVwu(vz&nN8C!ac3@J;W&7F{=8j9nZ7fc{@>cA6jLSNd##?unz`U*lktc6XnVft"
        "_t>?jUGi?=a(%tOTt=Uxth9OUYVGHjZd>#$n(*F*m7``(n3P)K1UKECU$_L)1^#}IbKD@EvvYR@6XQPaGQGVMHut(sV`2ciJ=v9kL4YBMk-?"
        "5p2P~k_%D@n?VwDyoT{18-a2;R*OBjJw0tH+dxB(|W=VJ"
    ),
    "context": (
        "c-q^+$N&b_O7ZczsU?Xii6x2g@k&<JN@@8;xrrr8R!S+UIVFkZnMJ8eI!a}!Ma7x<c|cJ^Ag{O}v8Xr|$SEl*1<9u7CFiGP=A{EglJoOQQY%"
        "V;g2@?)dFiPs@j$hSxy3*!OG}_=QetsxJi;^spipi;(584)8%pv^5_1q*jg8FBEMOLAmQ;dt>RDQvS(?MmOvy}7Ee1I|EiKK^)XX9&$v8F5("
        "9*;>(ZbL?*~~mSImN&%DH*H*t~SNcIK|M?*Z?SFlw_HdnwXMoVrXV+lxA+3Y-C^wvNAI-CAA{HII{}mUn65<rCO*MD6CRSDhoj3p<u^lB!W2"
        "6h8AYAKs!JInxB?doLU0(L9~GmNEoO$DJMTUTh9OlaGPLefN26yzmBm9(2QCIAkf&V|5xE<FDt_&KW+I0_d9F`wrwZZhy}_^#om^bniOid<7"
        "oZIrw16A7y`rtyU(2nnq6i--Fu4H?ye~ui+04a94>fQ<-Go(gyXNeA0HFv%UZat^<e5&nXzwX<h_lmYM0IBb!u}sg)f^QW;r7>TdP3QXT6Rz"
        "-^<?{{_L^awoOb<%P?^gi<(c*%iV?3nCy?+GuQP#UZ-!;{b)xUzhN!6MZ2O*bauO!&!mJO%^VCC`yTYX{9U-~VYvna*yV;-85kBY)-VFy_uu"
        "(HC?PU3{%2$YQVix6Om?>E)>U(Jt&*D^zek0qaIY|wzjRl}q2+<&J_A|fJLfZl*C)R!xxXwTp*}@Szc$)hNmZvtR_ouPwl(%*-V5`RV%PF0_"
        "w)$=`#k?(>PxF^v%ZfeKJCGsGizs_T4$*8a%t_AH@RDkI4^lHo!BR7=CP{4f7anL?v!omyHySX0F(I{o&"
    ),
    "planes": (
        "c-q^+$N&b_O7ZczsU?Xii6x2g@k&<JN@@8;xrrr8R!S+UIVFkZnMJ8eI!a}!Ma7x<c|cJ^Ag{O}v8Xr|$SEl*1<9u7CFiGP=A{Eg3UU(jQj3"
        "9N$r*`x>8UC4K&6Sf#XuQLOQ2{{VsUCb!Y~7%P;NfZqIgsbO7cq*a}ZjMjm*s~VD@H~RDyKsSz4M|n#0XZ$xKfz2Dv&dEzQu>%pxhtI5o}C("
        "!@B?!q7a~%se?c#lS2n8LR=WHpS35#n95&04QUWWSNwjn38N_Xl81ZW^S2mWMB!hGBYnFwIaSavkK&0pqNrER16eUDJ7K!An{PJ<1!LKoM=O"
        "HqgbFFpzzF3ODj$-0s0`?KnElY)SHx(pPa2{00Ov8u(ZT90jOWc*xWF-wpIZIG`8yhRk$e2%23p!CZFKCnwc$e=`5*>rc8Su6kk!@q17BR<w"
        "8$}!2}k^3#`7`>-s`FH_5pN^&Ro#b%{K*DrG@e(w2DhEygy|X?qpj{VZOHoL{!`aABj(>~|-9nNv2DKHcGPZcX_i!=Ar6zAJs0rp)U0%hF1I"
        "{dbyk<HOHq&nt?=>+fMs^pu;Q_*!>@4#$(5QQk~by7^8o7iReI=YV8%{*Et?E7TYn+HWrt0l77Sp+1zAA*qL-dxPpr9#>=0&5b^c#%VXq4)^"
        "3r8_&p{ZFqPauW{P#G=t>Z$9Oj98mn!{ZI%SmXKrjWY`nQm(m3a~K{8`<2or;js~gP$Bh<~l3=9Gc42%rF|MP7C08%#<$^"
    ),
}
"""Compressed files as text, by encoding."""
