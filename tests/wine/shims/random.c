/* bcryptprimitives.dll, which tokenizers needs and Wine 8 lacks: random bytes from advapi32. */
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size)
{
    while (size) {
        ULONG part = size > 65536 ? 65536 : (ULONG)size;
        if (!SystemFunction036(data, part))
            return FALSE;
        data += part;
        size -= part;
    }
    return TRUE;
}
