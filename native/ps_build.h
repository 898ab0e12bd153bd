/* Written by build_identity.py: the identity of the layout and of the extension's C sources. */
#ifndef PS_BUILD_H
#define PS_BUILD_H

#define PS_BUILD 0x3ae12343ab16e7d8ull

#endif
