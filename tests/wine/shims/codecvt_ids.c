/* msvcp140_codecvt_ids.dll, which openvino_genai needs and Wine 8 lacks: two identities of the C++ library. */
struct id {
    unsigned long long value;
};
struct id codecvt_id = {0};
